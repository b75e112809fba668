"""The loss in plain torch on whole [N, V] logits: the definition, to be read with docs/method.md
§1-4.

It fills `Rows` from log_softmax and sums over the vocabulary, and calls the functions of
token_losses.py; autograd gives the gradients by the logits. For reading and for testing the fused
path, not for training: memory grows with N * V, and nothing is sharded. Logits are not divided by
the temperature, and padded columns are cut off.

N scored rows, V common vocabulary, K columns of a support.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from stable_opd_mcore.losses.stop_tokens import NEVER
from stable_opd_mcore.losses.token_losses import NO_SCORES, Rows, Terms, token_losses
from stable_opd_mcore.records import LossOutput, MicroBatch


def defined_loss(
    terms: Terms,
    batch: MicroBatch,
    student_NV: Tensor,
    teacher_NV: Tensor | None = None,
    reference_NV: Tensor | None = None,
) -> LossOutput:
    """sum_t pg_t term_t + kl_t KL(student || reference)_t - sft_t log pi(y_t)."""
    rows = rows_of(terms, batch, student_NV, teacher_NV, reference_NV)
    if terms.discounted is not None and terms.settings.discount > 0:
        advantage_N = terms.discounted(rows, terms.settings.advantage)
        rows = replace(rows, returns=_discounted(advantage_N, batch, terms.settings.discount))
    output = token_losses(terms, rows, batch)
    sums = {name: getattr(output, name).sum() for name in ("loss", "pg", "kl", "sft")}
    return replace(output, **sums)


def rows_of(
    terms: Terms,
    batch: MicroBatch,
    student_NV: Tensor,
    teacher_NV: Tensor | None,
    reference_NV: Tensor | None,
) -> Rows:
    """All at the sampling temperature but the likelihood of golden tokens, which is at 1.

    Divergences are over outcomes: the stop ids that `terms` merge are one (docs/method.md §4).
    """
    targets_N, teacher = batch.targets_N, batch.teacher or NO_SCORES
    log_p_NV = (student_NV / terms.temperature).log_softmax(-1)
    outcomes_NV = merge_ids(log_p_NV, terms.merged_ids)
    at_1_N = target_logprob(student_NV.log_softmax(-1), targets_N, ())
    token_logprob_N = target_logprob(log_p_NV, targets_N, ())
    found: dict[str, Tensor | None] = {
        "teacher_logprob": teacher.logprob_N,
        "reference_logprob": (batch.reference or NO_SCORES).logprob_N,
    }
    if terms.divergence == "teacher_support":
        assert teacher.topk_ids_NK is not None
        found["support"] = outcomes_NV.gather(1, teacher.topk_ids_NK)
        found["teacher_support"] = teacher.topk_logprobs_NK
    log_q_NV = None
    if terms.teacher_logits:
        assert teacher_NV is not None
        tokens_NV = (teacher_NV / terms.temperature).log_softmax(-1)
        log_q_NV = merge_ids(tokens_NV, terms.merged_ids)
        found["teacher_logprob"] = target_logprob(tokens_NV, targets_N, terms.stop_ids)
        found["teacher_entropy"] = entropy(tokens_NV)
        if terms.compares_teacher:
            found["kl_teacher"] = kl_divergence(outcomes_NV, log_q_NV).detach()
    if terms.reference == "exact":
        assert reference_NV is not None
        log_r_NV = (reference_NV / terms.temperature).log_softmax(-1)
        found["reference_logprob"] = target_logprob(log_r_NV, targets_N, ())
        found["kl_reference"] = kl_divergence(outcomes_NV, merge_ids(log_r_NV, terms.merged_ids))
    rows = Rows.of(batch, target_logprob(log_p_NV, targets_N, terms.stop_ids), token_logprob_N)
    return replace(
        rows,
        likelihood=torch.where(batch.golden_N, at_1_N, token_logprob_N),
        divergence=divergence(terms, batch, outcomes_NV, log_q_NV),
        entropy=entropy(log_p_NV),
        **found,
    )


def divergence(
    terms: Terms, batch: MicroBatch, log_p_NV: Tensor, log_q_NV: Tensor | None
) -> Tensor | None:
    """Terms.divergence of student p and teacher q per row (docs/method.md §3)."""
    kind = terms.divergence
    if kind is None:
        return None
    if kind == "teacher_support":
        teacher = batch.teacher or NO_SCORES
        assert teacher.topk_ids_NK is not None
        assert teacher.topk_logprobs_NK is not None
        log_p_NK, log_q_NK = log_p_NV.gather(1, teacher.topk_ids_NK), teacher.topk_logprobs_NK
        if terms.settings.tail:
            log_p_NK, log_q_NK = with_tail(log_p_NK), with_tail(log_q_NK)
        return kl_divergence(log_p_NK.log_softmax(-1), log_q_NK.log_softmax(-1))
    assert log_q_NV is not None
    if kind == "student_support":
        ids_NK = log_p_NV.topk(terms.settings.top_k, dim=1).indices
        log_p_NV, log_q_NV = (x.gather(1, ids_NK) for x in (log_p_NV, log_q_NV))
        if terms.settings.tail:
            log_p_NV, log_q_NV = with_tail(log_p_NV), with_tail(log_q_NV)
        log_p_NV, log_q_NV = log_p_NV.log_softmax(-1), log_q_NV.log_softmax(-1)
    if kind == "forward":
        return kl_divergence(log_q_NV, log_p_NV)
    if kind == "jsd":
        b = terms.settings.jsd_beta
        log_m_NV = torch.logaddexp(log_q_NV + math.log(b), log_p_NV + math.log(1 - b))
        return b * kl_divergence(log_q_NV, log_m_NV) + (1 - b) * kl_divergence(log_p_NV, log_m_NV)
    return kl_divergence(log_p_NV, log_q_NV)


def with_tail(log_p_NK: Tensor) -> Tensor:
    """With the log-probability of all tokens outside the support, at least log 1e-5."""
    rest_N1 = (1 - log_p_NK.double().exp().sum(1, keepdim=True)).clamp(min=1e-5)
    return torch.cat([log_p_NK, rest_N1.log().to(log_p_NK.dtype)], dim=1)


def kl_divergence(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p || q) per row, exact."""
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)


def entropy(log_p_NV: Tensor) -> Tensor:
    """The entropy of each row, a constant."""
    return -(log_p_NV.exp() * log_p_NV).sum(-1).detach()


def target_logprob(log_p_NV: Tensor, targets_N: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """log p of the target, or of all stop ids together where it is one (docs/method.md §4)."""
    token_N = log_p_NV.gather(1, targets_N[:, None])[:, 0]
    if not stop_ids:
        return token_N
    is_stop_N = torch.isin(targets_N, targets_N.new_tensor(stop_ids))
    return torch.where(is_stop_N, log_p_NV[:, list(stop_ids)].logsumexp(-1), token_N)


def merge_ids(log_p_NV: Tensor, ids: Sequence[int]) -> Tensor:
    """log p with the ids as one outcome: the first id has the sum, the others log p = NEVER."""
    if not ids:
        return log_p_NV
    column_V = torch.arange(log_p_NV.shape[1], device=log_p_NV.device)
    member_V, first_V = torch.isin(column_V, column_V[list(ids)]), column_V == ids[0]
    merged_N1 = log_p_NV[:, list(ids)].logsumexp(-1, keepdim=True)
    return torch.where(first_V, merged_N1, log_p_NV.masked_fill(member_V, NEVER))


def _discounted(reward_N: Tensor, batch: MicroBatch, discount: float) -> Tensor:
    """G_t = sum over t' >= t of discount^(t'-t) r_t' in the sample; masked tokens add nothing."""
    samples = cast("list[int]", batch.sample_index_N.tolist())  # pyright: ignore[reportUnknownMemberType]
    tokens = cast("list[int]", batch.token_index_N.tolist())  # pyright: ignore[reportUnknownMemberType]
    place = list(zip(samples, tokens, strict=True))
    returns: list[Tensor] = []
    for sample, token in place:
        total = reward_N.new_zeros(())
        for row, (other_sample, later) in enumerate(place):
            if other_sample == sample and later >= token and batch.pg_weight_N[row] != 0:
                total = total + discount ** (later - token) * reward_N[row]
        returns.append(total)
    return torch.stack(returns) if returns else reward_N
