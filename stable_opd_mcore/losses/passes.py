"""The passes over one chunk of logits: per-token sums out, then the gradient written over the
logits.

The torch form is the definition and what a CPU runs; on CUDA the same functions call the Triton
kernels (kernels.py). Sums are local to a vocabulary shard and relative to the shard's own maximum,
so that merging shards and not overflowing are one operation (`reduce_pairs`), and one shard takes
the same path. METHOD §2 has the algebra. Not here: what the sums mean to an objective (fused.py).

C rows of a chunk, V columns of the local shard. z student logits, o another model's, both divided
by the temperature on reading. Every result is fp32 (fp64 for fp64 logits).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stable_opd_mcore.losses.head import Head, accumulation_dtype

# Rows x columns in flight in the torch form: a few buffers of 1 MiB stay in cache.
BLOCK_ELEMENTS = 2**18

# Columns of a pair of sums. With z' = z - max z, o' = o - max o over the shard, and an anchor a:
#   max z, sum e^z', sum e^z' z', max o, sum e^o', sum e^z'(z' - (o - a)), sum e^o'(o' - z'), a
# The anchor is any number near E_p[o]: without it KL, and every gap - KL of its gradient, would be
# a difference of large numbers where two confident models are far apart.
NUM_SUMS = 8


@dataclass(frozen=True)
class Normaliser:
    """log-softmax of logits x is (x - maximum) - log_sum, in this order: exact at large x."""

    maximum_C: Tensor
    log_sum_C: Tensor

    def log_softmax(self, logits_CJ: Tensor) -> Tensor:
        """Of divided logits at some columns, fp32 or fp64."""
        return (logits_CJ - self.maximum_C[:, None]) - self.log_sum_C[:, None]


@dataclass(frozen=True)
class PairStatistics:
    """Student against one other model, over the whole vocabulary."""

    student: Normaliser
    entropy_C: Tensor  # of the student
    other: Normaliser | None = None
    anchor_C: Tensor | None = None  # a number near E_p[o]
    centre_C: Tensor | None = None  # E_p[log p - (o - anchor)]
    student_to_other_C: Tensor | None = None  # KL(student || other)
    other_to_student_C: Tensor | None = None  # KL(other || student)

    def reverse_term(self, logits_CV: Tensor, weight_C: Tensor) -> DenseTerm:
        """weight * KL(student || other) for the gradient pass.

        log p - log o - KL = log p - (o - anchor) - centre: the other's normaliser cancels.
        """
        assert self.anchor_C is not None and self.centre_C is not None
        normaliser = Normaliser(self.anchor_C, torch.zeros_like(self.anchor_C))
        return DenseTerm("reverse", logits_CV, normaliser, weight_C, self.centre_C)


@dataclass(frozen=True)
class SparseColumns:
    """Numbers to add at a few columns of every row, before the temperature's factor."""

    columns_CJ: Tensor  # int64, local column, -1 where it lives in another shard
    values_CJ: Tensor


@dataclass(frozen=True)
class DenseTerm:
    """One full-vocabulary divergence of the gradient pass: weight_C * D(student, other)."""

    kind: str  # "reverse" KL(p||o), "forward" KL(o||p), "jsd"
    logits_CV: Tensor
    normaliser: Normaliser  # reverse: up to a constant, see PairStatistics.reverse_term
    weight_C: Tensor
    value_C: Tensor  # reverse: E_p[log p - log o]; jsd: KL(p||m); forward: unused
    jsd_beta: float = 0.5  # share of the other model in the mixture m


def local_sums(logits_CV: Tensor, other_CV: Tensor | None, scale: float) -> Tensor:
    """Sums of one shard for student logits and optionally one other model's: [C, NUM_SUMS].

    An empty shard reports maxima of -inf and sums of 0.
    """
    if logits_CV.is_cuda:
        from stable_opd_mcore.losses import kernels

        return kernels.local_sums(logits_CV, other_CV, scale)
    dtype = accumulation_dtype(logits_CV)
    sums_CS = torch.zeros(logits_CV.shape[0], NUM_SUMS, dtype=dtype, device=logits_CV.device)
    if logits_CV.shape[1] == 0:
        sums_CS[:, [0, 3]] = -torch.inf
        return sums_CS
    for block in _row_blocks(logits_CV):
        out = sums_CS[block]
        z = _scaled(logits_CV[block], scale, dtype)
        out[:, 0] = z.amax(1)
        z -= out[:, :1]
        exp_z = z.exp()
        out[:, 1] = exp_z.sum(1)
        out[:, 2] = (exp_z * z).sum(1)
        if other_CV is None:
            continue
        o = _scaled(other_CV[block], scale, dtype)
        out[:, 3] = o.amax(1)
        shifted = o - out[:, 3:4]
        gap = z - shifted
        mean_gap_B = (exp_z * gap).sum(1) / out[:, 1]
        exp_o = shifted.exp_()
        out[:, 4] = exp_o.sum(1)
        out[:, 6] = -(exp_o * gap).sum(1)
        out[:, 7] = out[:, 3] - mean_gap_B
        torch.sub(z, o.sub_(out[:, 7:]), out=gap)
        out[:, 5] = (exp_z * gap).sum(1)
    return sums_CS


def reduce_pairs(
    pairs: Sequence[Tensor], has_other: Sequence[bool], looked_up: Sequence[Tensor], head: Head
) -> tuple[list[PairStatistics], list[Tensor]]:
    """Merge the shards' sums and looked-up logits: one gather of maxima, one packed sum for the
    chunk.

    Args:
        pairs: `local_sums` of each pair, [C, NUM_SUMS].
        has_other: whether the pair has another model.
        looked_up: local parts of gathered logits, [C, J] each; come back whole.
        head: gives the group.
    """
    ranks_RCP3 = head.gather(torch.stack([pair[:, [0, 3, 7]] for pair in pairs], dim=1))
    maxima_CP3 = ranks_RCP3.amax(0)
    # The anchor of the shard where the student's maximum lies: moving it there would cost digits.
    winner_1CP1 = ranks_RCP3[..., :1].argmax(0, keepdim=True)
    maxima_CP3[..., 2:] = ranks_RCP3[..., 2:].gather(0, winner_1CP1)[0]

    packed = []
    for index, (pair, other) in enumerate(zip(pairs, has_other, strict=True)):
        max_z, max_o, anchor = maxima_CP3[:, index].unbind(1)
        shift_z = _shift(pair[:, 0], max_z)
        scale_z = shift_z.exp()
        packed += [pair[:, 1] * scale_z, (pair[:, 2] + pair[:, 1] * shift_z) * scale_z]
        if other:
            shift_o = _shift(pair[:, 3], max_o)
            scale_o, apart = shift_o.exp(), shift_z - shift_o
            anchored = shift_z + (anchor - pair[:, 7])
            packed += [
                pair[:, 4] * scale_o,
                (pair[:, 5] + pair[:, 1] * anchored) * scale_z,
                (pair[:, 6] - pair[:, 4] * apart) * scale_o,
            ]
    whole = torch.cat([torch.stack(packed, dim=1), *looked_up], dim=1)
    head.reduce_(whole)
    widths = [len(packed), *(part.shape[1] for part in looked_up)]
    sums_CS, *found = whole.split(widths, dim=1)
    return _statistics(sums_CS, maxima_CP3, has_other), list(found)


def jsd_sums(
    logits_CV: Tensor, other_CV: Tensor, pair: PairStatistics, beta: float, scale: float, head: Head
) -> tuple[Tensor, Tensor]:
    """KL(other || m) and KL(student || m) with m = beta other + (1 - beta) student, [C] each
    (METHOD §3).

    A second pass: the mixture needs both normalisers. One SUM all-reduce.
    """
    assert pair.other is not None
    if logits_CV.is_cuda:
        from stable_opd_mcore.losses import kernels

        sums_C2 = kernels.jsd_sums(logits_CV, other_CV, pair.student, pair.other, beta, scale)
    else:
        dtype = accumulation_dtype(logits_CV)
        sums_C2 = torch.zeros(logits_CV.shape[0], 2, dtype=dtype, device=logits_CV.device)
        for block in _row_blocks(logits_CV):
            log_p = _log_softmax(logits_CV, pair.student, block, scale, dtype)
            log_o = _log_softmax(other_CV, pair.other, block, scale, dtype)
            log_m = _log_mixture(log_o, log_p, beta)
            sums_C2[block, 0] = (log_o.exp() * (log_o - log_m)).sum(1)
            sums_C2[block, 1] = (log_p.exp() * (log_p - log_m)).sum(1)
    head.reduce_(sums_C2)
    return sums_C2[:, 0], sums_C2[:, 1]


def write_gradient_(
    logits_CV: Tensor,
    student: Normaliser,
    logprob_gradient_C: Tensor,
    target: SparseColumns,
    terms: Sequence[DenseTerm],
    scale: float,
) -> None:
    """Overwrite logits with d loss / d (logits before the temperature).

    With p the student's probabilities and c = d loss / d log p(target) (METHOD §2):
        -c p + sum over terms of  reverse: w p (log p - log o - KL)    forward: w (p - o)
                                  jsd: w (1 - beta) p (log p - log m - KL(p || m))
    plus `target`'s values at its columns (c at the target itself), all times scale. The sum is
    rounded once, so a confident token's c - c p survives bf16. At most one term of
    reverse-to-a-reference and one of any kind to a teacher. Rows of zero weight come out exactly
    zero.
    """
    if logits_CV.is_cuda:
        from stable_opd_mcore.losses import kernels

        kernels.write_gradient_(logits_CV, student, logprob_gradient_C, target, terms, scale)
        return
    dtype = accumulation_dtype(logits_CV)
    for block in _row_blocks(logits_CV):
        log_p = _log_softmax(logits_CV, student, block, scale, dtype)
        bracket = (-scale * logprob_gradient_C[block, None]).expand_as(log_p)
        subtracted = None
        for term in terms:
            log_o = _log_softmax(term.logits_CV, term.normaliser, block, scale, dtype)
            weight = scale * term.weight_C[block, None]
            if term.kind == "forward":
                bracket = bracket + weight
                subtracted = log_o.exp_().mul_(weight)
                continue
            if term.kind == "jsd":
                log_o = _log_mixture(log_o, log_p, term.jsd_beta)
                weight = weight * (1 - term.jsd_beta)
            gap = torch.sub(log_p, log_o, out=log_o).sub_(term.value_C[block, None])
            bracket = torch.addcmul(bracket, gap, weight)
        gradient = log_p.exp_().mul_(bracket)
        if subtracted is not None:
            gradient -= subtracted
        columns_CJ = target.columns_CJ[block]
        values_CJ = scale * target.values_CJ[block].masked_fill(columns_CJ < 0, 0)
        gradient.scatter_add_(1, columns_CJ.clamp_min(0), values_CJ)
        logits_CV[block] = gradient


def _statistics(
    sums_CS: Tensor, maxima_CP3: Tensor, has_other: Sequence[bool]
) -> list[PairStatistics]:
    """Entropies and divergences from whole sums.

    H = log S_z - E_p[z'],  KL(p || o) = E_p[z' - (o - a)] - log S_z + (max o - a) + log S_o.
    """
    results, sums = [], iter(sums_CS.unbind(1))
    for index, other in enumerate(has_other):
        max_z, max_o, anchor = maxima_CP3[:, index].unbind(1)
        sum_z, dot_zz = next(sums), next(sums)
        student = Normaliser(max_z, sum_z.log())
        entropy_C = student.log_sum_C - dot_zz / sum_z
        if not other:
            results.append(PairStatistics(student, entropy_C))
            continue
        sum_o, dot_zo, dot_oz = next(sums), next(sums), next(sums)
        normaliser = Normaliser(max_o, sum_o.log())
        centre_C = dot_zo / sum_z - student.log_sum_C
        results.append(
            PairStatistics(
                student=student,
                entropy_C=entropy_C,
                other=normaliser,
                anchor_C=anchor,
                centre_C=centre_C,
                student_to_other_C=centre_C + (max_o - anchor) + normaliser.log_sum_C,
                other_to_student_C=dot_oz / sum_o + student.log_sum_C - normaliser.log_sum_C,
            )
        )
    return results


def _shift(local_C: Tensor, whole_C: Tensor) -> Tensor:
    """local - whole maximum, <= 0; 0 for an empty shard, whose sums are 0 anyway."""
    return torch.where(local_C == -torch.inf, 0, local_C - whole_C)


def _row_blocks(logits_CV: Tensor) -> Iterator[slice]:
    """Slices of rows whose elements fit BLOCK_ELEMENTS; none for an empty shard."""
    rows, columns = logits_CV.shape
    if columns == 0:
        return
    step = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _scaled(block_BV: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """A copy in the accumulation dtype, times scale."""
    copy = block_BV.to(dtype, copy=True)
    return copy if scale == 1.0 else copy.mul_(scale)


def _log_softmax(
    logits_CV: Tensor, normaliser: Normaliser, block: slice, scale: float, dtype: torch.dtype
) -> Tensor:
    x = _scaled(logits_CV[block], scale, dtype)
    return x.sub_(normaliser.maximum_C[block, None]).sub_(normaliser.log_sum_C[block, None])


def _log_mixture(log_o: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """log(beta o + (1 - beta) p); finite for finite inputs."""
    return torch.logaddexp(log_o + math.log(beta), log_p + math.log(1 - beta))
