"""Context parallelism: the tokens of a micro-batch that one rank holds.

C ranks cut every packed sequence into 2C equal pieces; rank r holds pieces r and 2C-1-r, so that
causal attention costs every rank the same. Transformer Engine and Megatron's rotary embedding use
the same order. Targets are shifted before, because the next token may be on another rank.

Suffixes of names: records.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stable_opd_mcore.records import MicroBatch, fields_of_rows


def token_indices(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """The places of a rank's tokens among the T packed ones: int64 [T/size], in its order."""
    lengths_S = cu_seqlens.diff().long()
    assert not (lengths_S % (2 * size)).any(), "packing pads to World.sequence_multiple"
    piece_lengths_S = lengths_S // (2 * size)
    lengths = piece_lengths_S.repeat_interleave(2 * piece_lengths_S)  # per token of this rank
    starts = cu_seqlens[:-1].long().repeat_interleave(2 * piece_lengths_S)
    within = torch.arange(len(lengths), device=lengths.device) - starts // size
    # Pieces of other ranks before a token of this rank's first piece, or of its second.
    others = torch.where(within < lengths, rank, 2 * size - 2 - rank)
    return starts + within + others * lengths


def slice_microbatch(batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """A rank's share of a micro-batch without scores: its tokens, and the rows at these tokens.

    On the host, before to_device: how many rows it has depends on values. cu_seqlens and max_seqlen
    still describe the whole sequences.
    """
    if size == 1:
        return batch
    assert batch.teacher is None and batch.reference is None, "scores are computed after slicing"
    indices = token_indices(batch.cu_seqlens, rank, size)
    place_T = torch.full_like(batch.tokens_T, -1)
    place_T[indices] = torch.arange(len(indices), device=indices.device)
    place_N = place_T[batch.rows_N]
    mine_N = place_N >= 0
    of_rows = {name: values[mine_N] for name, values in fields_of_rows(batch).items()}
    of_rows["rows_N"] = place_N[mine_N]
    of_rows["golden_rows_G"] = of_rows["golden_N"].nonzero()[:, 0]
    if batch.routed_experts_TYX is not None:
        of_rows["routed_experts_TYX"] = batch.routed_experts_TYX[indices]
    return replace(
        batch,
        tokens_T=batch.tokens_T[indices],
        positions_T=batch.positions_T[indices],
        **of_rows,
    )
