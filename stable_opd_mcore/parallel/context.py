"""Context parallelism: which tokens of a micro-batch a rank holds.

    batch = slice_microbatch(batch, world.context_rank, world.context_size)

C ranks cut every packed sequence into 2C equal chunks; rank r holds chunks r and 2C-1-r, so that
causal attention costs them all the same. That is the order of Transformer Engine's
`thd_get_partitioned_indices` and of Megatron's rotary embedding, so either attention works on it.
Targets were shifted before: the next token may lie on another rank.

Not here: sequences of a multiple of 2C tokens (data/packing.py), attention over the slices
(models/attention.py).
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import MicroBatch


def token_indices(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Where a rank's tokens stand among the T packed ones: int64 [T/size], in the rank's order.

    Raises:
        UserError: a sequence whose length is no multiple of 2 size.
    """
    lengths_S = cu_seqlens.diff().long()
    if bool((lengths_S % (2 * size)).any()):
        raise UserError(
            f"sequences of {lengths_S.tolist()} tokens cannot be cut over {size} context-parallel "
            f"ranks: pad each to a multiple of {2 * size} (World.sequence_multiple)"
        )
    chunks_S = lengths_S // (2 * size)
    chunks = chunks_S.repeat_interleave(2 * chunks_S)  # per token of this rank
    starts = cu_seqlens[:-1].long().repeat_interleave(2 * chunks_S)
    within = torch.arange(len(chunks), device=chunks.device) - starts // size
    # A token of the second half also skips the chunks of the other ranks between its rank's two.
    skipped = torch.where(within < chunks, rank, 2 * size - 2 - rank)
    return starts + within + skipped * chunks


def slice_microbatch(batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """A rank's share of a micro-batch without scores: its tokens, and the rows that lie on them.

    cu_seqlens and max_seqlen go on describing the whole sequences.

    Raises:
        UserError: a sequence whose length is no multiple of 2 size.
    """
    if size == 1:
        return batch
    assert batch.teacher is None and batch.reference is None, "scores belong to a slice already"
    indices = token_indices(batch.cu_seqlens, rank, size)
    place_T = torch.full_like(batch.tokens_T, -1)
    place_T[indices] = torch.arange(len(indices), device=indices.device)
    place_N = place_T[batch.rows_N]
    mine_N = place_N >= 0
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    of_rows = {
        name: value[mine_N]
        for name, value in values.items()
        if name.endswith("_N") and value is not None
    }
    of_rows["rows_N"] = place_N[mine_N]
    return replace(
        batch,
        tokens_T=batch.tokens_T[indices],
        positions_T=batch.positions_T[indices],
        **of_rows,
    )
