"""Turn sums of vocabulary shards into normalisers, entropies and divergences of whole rows.

Chooses the form of the passes by device (`operations`: torch_ops.py on a CPU, triton_ops.py on
CUDA). Each shard's sums are relative to its own maximum, so merging shards and avoiding overflow
are one operation (`merge_shards`); one shard takes the same path. docs/method.md §2 has the
algebra.

C rows of a block, V columns of the local shard, J looked-up columns, S sums of a row, R shards, G
golden rows of a block.
"""

# torch types `split` and `tolist` only in part; the results in use are cast.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TypeVar, cast

import torch
from torch import Tensor

from stable_opd_mcore.losses import torch_ops
from stable_opd_mcore.losses.output_head import Head, ModelTensors
from stable_opd_mcore.losses.torch_ops import (
    DenseDivergence,
    DenseTerm,
    Normaliser,
    ShardSums,
    SparseColumns,
)

_Sums = TypeVar("_Sums", ShardSums, ShardSums | None)
_Columns = TypeVar("_Columns", Tensor, Tensor | None)


def operations(logits_CV: Tensor) -> ModuleType:
    """The module whose shard_sums, jsd_sums and write_gradient_ work on these logits."""
    if not logits_CV.is_cuda:
        return torch_ops
    from stable_opd_mcore.losses import triton_ops

    return triton_ops


@dataclass(frozen=True)
class Statistics:
    """One model over the whole vocabulary: the student, or another one summed by itself."""

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

    jsd_sums_C2: Tensor | None = None  # what `jsd_sums_of` returns; set for "jsd"

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

    def divergence(self, kind: DenseDivergence, beta: float) -> Tensor:
        """The divergence [C]."""
        if kind == "reverse":
            return self.reverse_kl_C
        if kind == "forward":
            return self.forward_kl_C
        assert self.jsd_sums_C2 is not None
        return beta * self.jsd_sums_C2[:, 0] + (1 - beta) * self.jsd_sums_C2[:, 1]

    def term(
        self, kind: DenseDivergence, other_CV: Tensor, weight_C: Tensor, beta: float = 0.5
    ) -> DenseTerm:
        """weight * divergence for the gradient pass.

        reverse: log p - log o - KL = log p - (o - anchor) - centre; the other's normaliser cancels.
        """
        if kind == "reverse":
            normaliser = Normaliser(self.anchor_C, torch.zeros_like(self.anchor_C))
            return DenseTerm(kind, other_CV, normaliser, weight_C, self.centre_C)
        if kind == "forward":
            return DenseTerm(kind, other_CV, self.other, weight_C, weight_C)  # has no centre
        assert self.jsd_sums_C2 is not None
        return DenseTerm(kind, other_CV, self.other, weight_C, self.jsd_sums_C2[:, 1], beta)


def merge_shards(
    sums: Sequence[_Sums], looked_up: Sequence[_Columns], head: Head
) -> tuple[list[_Sums], list[_Columns]]:
    """Sums and looked-up logits [C, J] over all shards: one gather and one all-reduce."""
    if head.group is None or head.group.size() == 1:  # the algebra below would change no bit
        return list(sums), list(looked_up)
    tables = [_table(x) for x in sums if x is not None]
    shards_RCS = head.gather(torch.cat(tables, dim=1))
    parts = iter(torch.split(shards_RCS, [table.shape[1] for table in tables], dim=2))
    columns = [x for x in looked_up if x is not None]
    whole = head.reduce_(torch.cat(columns, dim=1))
    whole_columns = iter(torch.split(whole, [x.shape[1] for x in columns], dim=1))
    merged = [x if x is None else _sum_over_shards(next(parts)) for x in sums]
    joined = [x if x is None else next(whole_columns) for x in looked_up]
    return cast("list[_Sums]", merged), cast("list[_Columns]", joined)


def add_sums(first: ShardSums, second: ShardSums) -> ShardSums:
    """Sums over two sets of columns together; both or neither have another model."""
    return _sum_over_shards(torch.stack([_table(first), _table(second)]))


def _sum_over_shards(shards_RCS: Tensor) -> ShardSums:
    """Sums over several sets of columns together, from theirs in the order of ShardSums.

    When a maximum grows by -shift, sums of e^z' shrink by e^shift and their dots gain sum * shift.
    """
    x = ShardSums(*shards_RCS.unbind(2))  # [R, C] each
    student_max, shift_z = _highest(x.student_max)
    scale_z = shift_z.exp()
    sums = [x.student_sum * scale_z, (x.student_dot + x.student_sum * shift_z) * scale_z]
    if x.other_max is None:
        return ShardSums(student_max, *(each.sum(0) for each in sums))
    assert x.other_sum is not None and x.other_gap is not None
    assert x.student_gap is not None and x.anchor is not None
    other_max, shift_o = _highest(x.other_max)
    # The anchor of the shard that has the student's maximum: moving it there would cost digits.
    anchor = x.anchor.gather(0, x.student_max.argmax(0, keepdim=True))[0]
    anchored, apart = shift_z + (anchor - x.anchor), shift_z - shift_o
    student_sum, student_dot, other_sum, student_gap, other_gap = (
        each.sum(0)
        for each in (
            *sums,
            x.other_sum * shift_o.exp(),
            (x.student_gap + x.student_sum * anchored) * scale_z,
            (x.other_gap - x.other_sum * apart) * shift_o.exp(),
        )
    )
    return ShardSums(
        student_max, student_sum, student_dot, other_max, other_sum, student_gap, other_gap, anchor
    )


def _highest(maxima_RC: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum over shards, and each shard's distance from it, <= 0 (0 for an empty shard)."""
    whole_C = maxima_RC.amax(0)
    return whole_C, (maxima_RC - whole_C).masked_fill(maxima_RC == -torch.inf, 0)


def _table(sums: ShardSums) -> Tensor:
    return torch.stack([x for x in sums if x is not None], dim=1)


def jsd_sums_of(
    pair: PairStatistics,
    logits: ModelTensors,
    outcome: ModelTensors | None,
    beta: float,
    scale: float,
    head: Head,
) -> Tensor:
    """`jsd_sums` [C, 2] of student and teacher over all shards; an outcome is one more column."""
    normalisers = (pair.normaliser, pair.other)

    def second_pass(models: ModelTensors) -> Tensor:
        passes = operations(models.student)
        return passes.jsd_sums(models.student, models.teacher, *normalisers, beta, scale)

    sums_C2 = second_pass(logits)
    if outcome is not None:
        sums_C2 += second_pass(outcome)
    return head.reduce_(sums_C2)


@dataclass(frozen=True)
class GoldenLikelihood:
    """Golden tokens at temperature 1, used if the loss has another one (docs/method.md §2)."""

    rows_G: Tensor
    ids_G1: Tensor
    logits_GV: Tensor
    normaliser: Normaliser
    logprob_G: Tensor

    @classmethod
    def of(
        cls, logits_CV: Tensor, rows_G: Tensor, targets_C: Tensor, head: Head
    ) -> GoldenLikelihood:
        """The likelihood of `rows_G`, from logits without merged columns. Collective."""
        logits_GV, ids_G1 = logits_CV[rows_G], targets_C[rows_G, None]
        looked_up = [head.gather_columns(logits_GV, ids_G1)]
        local: ShardSums = operations(logits_GV).shard_sums(logits_GV, None, 1.0)
        (sums,), (target_G1,) = merge_shards([local], looked_up, head)
        normaliser = Statistics(sums).normaliser
        logprob_G = normaliser.log_softmax(target_G1)[:, 0]
        return cls(rows_G, ids_G1, logits_GV, normaliser, logprob_G)

    def add_gradient_(self, gradient_CV: Tensor, by_logprob_G: Tensor, head: Head) -> None:
        """Add the gradient by the logits, from that by logprob_G. Consumes the copied logits."""
        columns_G1, here_G1 = head.local_columns(self.ids_G1)
        target = SparseColumns(columns_G1.masked_fill(~here_G1, -1), by_logprob_G[:, None])
        operations(self.logits_GV).write_gradient_(
            self.logits_GV, self.normaliser, by_logprob_G, target, [], 1.0
        )
        gradient_CV.index_add_(0, self.rows_G, self.logits_GV)
