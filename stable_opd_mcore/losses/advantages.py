"""What a sampled token is worth, and the clipped surrogate that uses it (METHOD §1, §3).

Every function works on [C] or [N] fp32 vectors; nothing here sees logits. Advantages are constants
of the loss: all inputs are detached. Not here: group-normalised rewards, which need the global
batch (weights.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stable_opd_mcore.config.schema import AdvantageConfig
from stable_opd_mcore.errors import UserError

# (behaviour log-prob, teacher log-prob, advantage given with the sample, settings) -> advantage
AdvantageFunction = Callable[[Tensor, Tensor | None, Tensor | None, AdvantageConfig], Tensor]


def teacher_over_student(
    behaviour_logprob_C: Tensor,
    teacher_logprob_C: Tensor | None,
    given_C: Tensor | None,
    settings: AdvantageConfig,
) -> Tensor:
    """A = log pi_T - log pi_old, or pi_T^alpha - pi_old^alpha with settings.power; clamped if
    asked.

    Raises:
        UserError: the micro-batch carries no teacher scores.
    """
    if teacher_logprob_C is None:
        raise UserError("this objective needs teacher scores: attach them to the micro-batch first")
    if settings.power is None:
        advantage_C = teacher_logprob_C - behaviour_logprob_C
    else:
        alpha = settings.power
        advantage_C = (alpha * teacher_logprob_C).exp() - (alpha * behaviour_logprob_C).exp()
    if settings.clamp is not None:
        advantage_C = advantage_C.clamp(-settings.clamp, settings.clamp)
    return advantage_C


def given_with_sample(
    behaviour_logprob_C: Tensor,
    teacher_logprob_C: Tensor | None,
    given_C: Tensor | None,
    settings: AdvantageConfig,
) -> Tensor:
    """The advantage that came with the sample (GRPO: from rewards); clamped if asked.

    Raises:
        UserError: the micro-batch carries no advantages.
    """
    if given_C is None:
        raise UserError(
            "this objective needs MicroBatch.given_advantage_N: pack with its token_weights"
        )
    if settings.clamp is not None:
        return given_C.clamp(-settings.clamp, settings.clamp)
    return given_C


def clipped_surrogate(
    logprob_C: Tensor, old_logprob_C: Tensor | None, advantage_C: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A), its derivative by log pi, and where the bound
    held.

    old_logprob_C None means that pi_old is the present policy: rho is exactly 1 (METHOD §1).
    """
    if old_logprob_C is None:
        return -advantage_C, -advantage_C, torch.zeros_like(advantage_C, dtype=torch.bool)
    ratio_C = (logprob_C - old_logprob_C).exp()
    bounded_C = ratio_C.clamp(1 - clip, 1 + clip)
    clipped_C = ratio_C * advantage_C > bounded_C * advantage_C
    loss_C = -torch.minimum(ratio_C * advantage_C, bounded_C * advantage_C)
    derivative_C = (-ratio_C * advantage_C).masked_fill(clipped_C, 0)
    return loss_C, derivative_C, clipped_C


def return_to_go(
    values_N: Tensor,
    sample_index_N: Tensor,
    token_index_N: Tensor,
    discount: float,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum over t' >= t of discount^(t'-t) values_t' within each sample (METHOD §3, sequence-level
    OPD).

    Tokens may come in any order; a sample's tokens must all be in this micro-batch, here or on the
    other ranks of `context_group`. Doubles its reach each round, so log2(longest response) rounds.
    Discount 0 returns the values.
    """
    if discount == 0:
        return values_N
    if context_group is not None:
        rows = (values_N, sample_index_N, token_index_N)
        whole, mine = _gather_rows(
            torch.stack([row.double() for row in rows], dim=1), context_group
        )
        values, sample_index, token_index = whole.unbind(dim=1)
        sums = return_to_go(
            values.to(values_N.dtype), sample_index.long(), token_index.long(), discount
        )
        return sums[mine]
    if values_N.numel() == 0:
        return values_N
    samples, sample_N = sample_index_N.unique(return_inverse=True)
    length = int(token_index_N.max()) + 1
    sums_SL = values_N.new_zeros(len(samples), length)
    sums_SL[sample_N, token_index_N] = values_N
    reach = 1
    while reach < length:
        shifted_SL = torch.zeros_like(sums_SL)
        shifted_SL[:, :-reach] = sums_SL[:, reach:]
        sums_SL = sums_SL + discount**reach * shifted_SL
        reach *= 2
    return sums_SL[sample_N, token_index_N]


def _gather_rows(rows_NK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, slice]:
    """The rows of all ranks, whose numbers may differ, and where this rank's own stand in them."""
    counts = [rows_NK.new_zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(counts, counts[0].new_tensor([len(rows_NK)]), group=group)
    lengths = torch.cat(counts).tolist()
    padded = F.pad(rows_NK, (0, 0, 0, max(lengths) - len(rows_NK)))
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    start = sum(lengths[: group.rank()])
    whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return whole, slice(start, start + len(rows_NK))
