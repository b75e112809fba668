"""Forward-only scores of the scored rows, in blocks: log-probabilities, entropy, top-K, overlap.

Teacher, reference and student are all scored here; nothing of size [N, V] is kept.

Letters: N scored rows, C rows of a block, V rows of this rank's shard of the head, H hidden size, K
entries of a top-K list, J ids that are looked up at every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stable_opd_mcore.losses.output_head import Head, ModelTensors, accumulation_dtype
from stable_opd_mcore.losses.stop_tokens import looked_up_ids, merge_stops_, target_logprobs
from stable_opd_mcore.losses.torch_ops import ShardSums
from stable_opd_mcore.losses.vocabulary_sums import Statistics, merge_shards, operations
from stable_opd_mcore.records import Scores


@torch.no_grad()
def score(
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature: float,
    stop_ids: tuple[int, ...] = (),
    top_k: int | None = None,
    merged_ids: tuple[int, ...] = (),
    block_rows: int = 1024,
) -> Scores:
    """Score targets under log-softmax(hidden @ weight.T / temperature). Collective over head.group.

    Args:
        stop_ids: where the target is one of them, they are scored together, as one outcome.
        merged_ids: stop ids that are one entry of the top-K list, under the first of them
            (docs/method.md §4).

    Raises:
        UserError: top_k exceeds the vocabulary.
    """
    count = targets_N.shape[0]
    assert hidden_NH.shape[0] == count, "select the scored rows"
    dtype = accumulation_dtype(head.weight_VH)
    logprob_N, token_logprob_N, entropy_N = hidden_NH.new_empty(3, count, dtype=dtype)
    ids_NK = logprobs_NK = None
    if top_k is not None:
        ids_NK = targets_N.new_empty(count, top_k)
        logprobs_NK = hidden_NH.new_empty(count, top_k, dtype=dtype)
    scale = 1.0 / temperature
    buffer_CV = head.logits_buffer(min(count, block_rows))
    ids_NJ = looked_up_ids(targets_N, stop_ids, head.vocab_size)
    for start in range(0, count, block_rows):
        rows = slice(start, min(start + block_rows, count))
        logits_CV = head.logits(hidden_NH[rows], out=buffer_CV[: rows.stop - start])
        looked_up = [head.gather_columns(logits_CV, ids_NJ[rows])]
        local: ShardSums = operations(logits_CV).shard_sums(logits_CV, None, scale)
        (sums,), (target_CJ,) = merge_shards([local], looked_up, head)
        statistics = Statistics(sums)
        logprob_N[rows], token_logprob_N[rows] = target_logprobs(
            target_CJ * scale, statistics.normaliser, ids_NJ[rows]
        )
        entropy_N[rows] = statistics.entropy_C
        if ids_NK is not None and logprobs_NK is not None:
            merged = None
            if merged_ids:
                merged = merge_stops_(ModelTensors(logits_CV), merged_ids, scale, head)
            values_CK, ids_NK[rows] = head.top_k(logits_CV, ids_NK.shape[1])
            if merged is not None:
                values_CK = merged.exact(ids_NK[rows], ModelTensors(values_CK), 1.0).student
            logprobs_NK[rows] = statistics.normaliser.log_softmax(values_CK * scale)
    return Scores(logprob_N, token_logprob_N, entropy_N, ids_NK, logprobs_NK)


@dataclass(frozen=True)
class Overlap:
    """How far the top-K lists of student and teacher agree, per row (docs/method.md §5)."""

    ratio_N: Tensor  # |S_student and S_teacher| / K
    student_mass_N: Tensor  # the student's probability on the intersection
    teacher_mass_N: Tensor  # the teacher's
    # E_p[log q - log p], both renormalised on the intersection; 0 where it is empty
    advantage_N: Tensor


def overlap(
    student_ids_NK: Tensor,
    student_logprobs_NK: Tensor,
    teacher_ids_NK: Tensor,
    teacher_logprobs_NK: Tensor,
) -> Overlap:
    """Compare two top-K lists of equal K; ids are unique within a row."""
    assert student_ids_NK.shape == teacher_ids_NK.shape
    same_NKK = student_ids_NK[:, :, None] == teacher_ids_NK[:, None, :]
    shared_NK = same_NKK.any(2)
    log_q = torch.where(same_NKK, teacher_logprobs_NK[:, None, :], -torch.inf).amax(2)
    log_p = student_logprobs_NK.masked_fill(~shared_NK, -torch.inf)
    p_NK = log_p.masked_fill(~shared_NK.any(1)[:, None], 0).softmax(1)
    gap_NK = (log_q - log_q.logsumexp(1, keepdim=True)) - (log_p - log_p.logsumexp(1, keepdim=True))
    advantage_N = (p_NK * gap_NK.masked_fill(~shared_NK, 0)).sum(1)
    return Overlap(
        ratio_N=shared_NK.to(log_p.dtype).mean(1),
        student_mass_N=log_p.exp().sum(1),
        teacher_mass_N=log_q.exp().sum(1),
        advantage_N=advantage_N,
    )
