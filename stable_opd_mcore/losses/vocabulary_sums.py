"""From the sums of vocabulary shards to normalisers, entropies and divergences of whole rows.

Chooses the form of the passes by device (`operations`: torch_ops.py on a CPU, triton_ops.py on
CUDA). Each shard's sums are relative to its own maximum, so merging shards and avoiding overflow
are one operation (`merge_shards`); one shard takes the same path. docs/method.md §2 has the
algebra. Not here: what the sums mean to an objective (fused.py).

C rows of a block, V columns of the local shard, J looked-up columns, K columns of a support, P
pairs of models, R shards.
"""

# torch types `split` and `tolist` only in part; the results in use are cast.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from stable_opd_mcore.losses import torch_ops
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.torch_ops import DenseTerm, Normaliser, ShardSums, SparseColumns


def operations(logits_CV: Tensor) -> ModuleType:
    """The module whose shard_sums, divergence_sums and write_gradient_ work on these logits."""
    if not logits_CV.is_cuda:
        return torch_ops
    from stable_opd_mcore.losses import triton_ops

    return triton_ops


@dataclass(frozen=True)
class Statistics:
    """One model over the whole vocabulary: the student, or the other where it is summed alone.

    Properties are computed where they are read: the gradient of a block needs only a part of them.
    """

    sums: ShardSums  # over all shards

    @cached_property
    def normaliser(self) -> Normaliser:
        return Normaliser(self.sums.student_max, self.sums.student_sum.log())

    @cached_property
    def entropy_C(self) -> Tensor:
        """H = log S_z - E_p[z']."""
        return self.normaliser.log_sum_C - self.sums.student_dot / self.sums.student_sum


@dataclass(frozen=True)
class PairStatistics(Statistics):
    """The student, compared with one other model over the whole vocabulary."""

    @cached_property
    def other(self) -> Normaliser:
        assert self.sums.other_max is not None and self.sums.other_sum is not None
        return Normaliser(self.sums.other_max, self.sums.other_sum.log())

    @property
    def anchor_C(self) -> Tensor:
        """A number near E_p[o]."""
        assert self.sums.anchor is not None
        return self.sums.anchor

    @cached_property
    def centre_C(self) -> Tensor:
        """E_p[log p - (o - anchor)]."""
        assert self.sums.student_gap is not None
        return self.sums.student_gap / self.sums.student_sum - self.normaliser.log_sum_C

    @cached_property
    def reverse_kl_C(self) -> Tensor:
        """KL(p || o) = E_p[z' - (o - a)] - log S_z + (max o - a) + log S_o."""
        return self.centre_C + (self.other.maximum_C - self.anchor_C) + self.other.log_sum_C

    @cached_property
    def forward_kl_C(self) -> Tensor:
        """KL(o || p)."""
        assert self.sums.other_gap is not None and self.sums.other_sum is not None
        gap_C = self.sums.other_gap / self.sums.other_sum
        return gap_C + self.normaliser.log_sum_C - self.other.log_sum_C

    def divergence(self, kind: str, sums_C2: Tensor | None, beta: float) -> Tensor:
        """The divergence [C]; sums_C2: of `divergence_sums`."""
        if kind == "reverse":
            return self.reverse_kl_C
        if kind == "forward":
            return self.forward_kl_C
        assert sums_C2 is not None, f"{kind} needs a second pass"
        return torch_ops.divergence_value(kind, sums_C2, beta)

    def term(
        self, kind: str, other_CV: Tensor, weight_C: Tensor, sums_C2: Tensor | None, beta: float
    ) -> DenseTerm:
        """weight * divergence for the gradient pass.

        reverse: log p - log o - KL = log p - (o - anchor) - centre; the other's normaliser cancels.
        """
        if kind == "reverse":
            normaliser = Normaliser(self.anchor_C, torch.zeros_like(self.anchor_C))
            return DenseTerm(kind, other_CV, normaliser, weight_C, self.centre_C)
        if kind == "forward":
            return DenseTerm(kind, other_CV, self.other, weight_C, weight_C)  # has no centre
        assert sums_C2 is not None, f"{kind} needs a second pass"
        return DenseTerm(kind, other_CV, self.other, weight_C, sums_C2[:, 1], beta)


def merge_shards(
    pairs: Sequence[ShardSums], looked_up: Sequence[Tensor], head: Head
) -> tuple[list[Statistics], list[Tensor]]:
    """Merge the shards' sums and looked-up logits: one gather of maxima, one packed all-reduce.

    Args:
        pairs: this shard's sums of each pair of models.
        looked_up: local parts of gathered logits, [C, J] each; they come back whole.
        head: gives the group.
    """
    if head.group is None or head.group.size() == 1:  # the algebra below would change no bit
        return [_statistics(pair) for pair in pairs], list(looked_up)
    maxima_CP3 = _whole_maxima(pairs, head)
    packed: list[Tensor] = []
    for index, pair in enumerate(pairs):
        packed += _sums_relative_to(pair, *maxima_CP3[:, index].unbind(1))
    whole = torch.cat([torch.stack(packed, dim=1), *looked_up], dim=1)
    head.reduce_(whole)
    widths = [len(packed), *(part.shape[1] for part in looked_up)]
    sums_CS, *whole_looked_up = torch.split(whole, widths, dim=1)
    sums = iter(sums_CS.unbind(1))
    statistics: list[Statistics] = []
    for index, pair in enumerate(pairs):
        max_z, max_o, anchor = maxima_CP3[:, index].unbind(1)
        merged = ShardSums(max_z, next(sums), next(sums))
        if pair.other_max is not None:
            merged = ShardSums(*merged[:3], max_o, next(sums), next(sums), next(sums), anchor)
        statistics.append(_statistics(merged))
    return statistics, whole_looked_up


def add_sums(first: ShardSums, second: ShardSums) -> ShardSums:
    """Sums over two sets of columns together; both or neither have another model."""
    student_max = torch.maximum(first.student_max, second.student_max)
    other_max = anchor = None
    if first.other_max is not None and second.other_max is not None:
        assert first.anchor is not None and second.anchor is not None
        other_max = torch.maximum(first.other_max, second.other_max)
        wins = first.student_max >= second.student_max
        anchor = torch.where(wins, first.anchor, second.anchor)
    parts = [_sums_relative_to(x, student_max, other_max, anchor) for x in (first, second)]
    sums = [x + y for x, y in zip(*parts, strict=True)]
    if other_max is None:
        return ShardSums(student_max, *sums)
    student_sum, student_dot, other_sum, student_gap, other_gap = sums
    return ShardSums(
        student_max, student_sum, student_dot, other_max, other_sum, student_gap, other_gap, anchor
    )


def _sums_relative_to(
    pair: ShardSums, max_z: Tensor, max_o: Tensor | None, anchor: Tensor | None
) -> list[Tensor]:
    """student_sum, student_dot, and where there is another model other_sum, student_gap and
    other_gap, relative to larger maxima and another anchor.
    """
    shift_z = _shift(pair.student_max, max_z)
    scale_z = shift_z.exp()
    sums = [
        pair.student_sum * scale_z,
        (pair.student_dot + pair.student_sum * shift_z) * scale_z,
    ]
    if pair.other_max is None or max_o is None or anchor is None:
        return sums
    assert pair.other_sum is not None and pair.other_gap is not None
    assert pair.student_gap is not None and pair.anchor is not None
    shift_o = _shift(pair.other_max, max_o)
    scale_o, apart = shift_o.exp(), shift_z - shift_o
    anchored = shift_z + (anchor - pair.anchor)
    return [
        *sums,
        pair.other_sum * scale_o,
        (pair.student_gap + pair.student_sum * anchored) * scale_z,
        (pair.other_gap - pair.other_sum * apart) * scale_o,
    ]


def _whole_maxima(pairs: Sequence[ShardSums], head: Head) -> Tensor:
    """Maxima of student and other over all shards, and one anchor, [C, P, 3]."""
    parts: list[Tensor] = []
    for pair in pairs:
        others = (pair.student_max if x is None else x for x in (pair.other_max, pair.anchor))
        parts.append(torch.stack([pair.student_max, *others], dim=1))
    ranks_RCP3 = head.gather(torch.stack(parts, dim=1))
    maxima_CP3 = ranks_RCP3.amax(0)
    # The anchor of the shard where the student's maximum lies: moving it there would cost digits.
    winner_1CP1 = ranks_RCP3[..., :1].argmax(0, keepdim=True)
    maxima_CP3[..., 2:] = ranks_RCP3[..., 2:].gather(0, winner_1CP1)[0]
    return maxima_CP3


def _shift(local_C: Tensor, whole_C: Tensor) -> Tensor:
    """local - whole maximum, <= 0; 0 for an empty shard, whose sums are 0 anyway."""
    return (local_C - whole_C).masked_fill(local_C == -torch.inf, 0)


def _statistics(sums: ShardSums) -> Statistics:
    return Statistics(sums) if sums.other_max is None else PairStatistics(sums)


def divergence_sums(
    kind: str,
    pair: PairStatistics,
    logits_CV: Tensor,
    other_CV: Tensor,
    beta: float,
    scale: float,
    head: Head,
    outcome: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Sums [C, 2] of a second pass over both models' logits; None where the pair's sums suffice.

    One all-reduce. `outcome`: [C, 1] logits of both models of one more column.
    """
    if kind in ("reverse", "forward"):
        return None
    second_pass = operations(logits_CV).divergence_sums
    normalisers = (pair.normaliser, pair.other)
    sums_C2 = second_pass(kind, logits_CV, other_CV, *normalisers, beta, scale)
    if outcome is not None:
        sums_C2 += second_pass(kind, *outcome, *normalisers, beta, scale)
    return head.reduce_(sums_C2)


@dataclass(frozen=True)
class SupportDivergence:
    """KL(p || q) with both renormalised over K columns (docs/method.md §3, lsm, student_topk)."""

    ids_CK: Tensor
    value_C: Tensor
    gradient_CK: Tensor  # d value / d student logits at ids: p (log p/q - KL)

    @classmethod
    def of(cls, ids_CK: Tensor, student_CK: Tensor, teacher_CK: Tensor) -> SupportDivergence:
        """From logits or log-probabilities of both models at the same ids; constants cancel."""
        log_p = student_CK.log_softmax(1)
        gap_CK = log_p - teacher_CK.to(log_p.dtype).log_softmax(1)
        p = log_p.exp()
        value_C = (p * gap_CK).sum(1)
        return cls(ids_CK, value_C, p * (gap_CK - value_C[:, None]))


@dataclass(frozen=True)
class GoldenLikelihood:
    """Log-probabilities of a block's golden tokens at temperature 1 (docs/method.md §2).

    For losses at another temperature. Holds a copy of the logits of the G golden rows.
    """

    rows_G: Tensor
    ids_G1: Tensor
    logits_GV: Tensor
    normaliser: Normaliser
    logprob_G: Tensor

    @classmethod
    def of(
        cls, logits_CV: Tensor, rows_G: Tensor, targets_C: Tensor, head: Head
    ) -> GoldenLikelihood:
        """Of some rows of a block, from logits without merged columns. Collective over
        head.group.
        """
        logits_GV, ids_G1 = logits_CV[rows_G], targets_C[rows_G, None]
        looked_up = [head.gather_columns(logits_GV, ids_G1)]
        sums = operations(logits_GV).shard_sums(logits_GV, None, 1.0)
        (statistics,), (target_G1,) = merge_shards([sums], looked_up, head)
        logprob_G = statistics.normaliser.log_softmax(target_G1)[:, 0]
        return cls(rows_G, ids_G1, logits_GV, statistics.normaliser, logprob_G)

    @staticmethod
    def rows_of_blocks(sft_weight_N: Tensor, block_rows: int) -> tuple[Tensor, list[Tensor]]:
        """All rows with a weight, and per block its own, counted from the block's start.

        Two copies to the host, before the loop over blocks.
        """
        rows_N = sft_weight_N.nonzero()[:, 0]
        starts = torch.arange(0, len(sft_weight_N), block_rows, device=rows_N.device)
        edges = cast("list[int]", torch.searchsorted(rows_N, starts).tolist())
        sizes = [stop - start for start, stop in pairwise([*edges, len(rows_N)])]
        return rows_N, list(cast("Sequence[Tensor]", (rows_N % block_rows).split(sizes)))

    def add_gradient_(self, gradient_CV: Tensor, sft_weight_C: Tensor, head: Head) -> None:
        """Add d(-weight log p) / d logits. Consumes the copied logits."""
        weight_G = sft_weight_C[self.rows_G]
        columns_G1, here_G1 = head.local_columns(self.ids_G1)
        target = SparseColumns(columns_G1.masked_fill(~here_G1, -1), -weight_G[:, None])
        operations(self.logits_GV).write_gradient_(
            self.logits_GV, self.normaliser, -weight_G, target, [], 1.0
        )
        gradient_CV.index_add_(0, self.rows_G, self.logits_GV)
