"""The numbers per row through which the logits enter the loss, and their gradients by the logits.

A block of rows has logits of each model, their sums over the vocabulary, and from them its leaves.
`differentiate` evaluates the loss (token_losses.py) and takes its gradient by each leaf from
autograd, over tensors of [rows]. `write_gradient_` turns these into the gradient by the logits, in
one pass. The gradient of each leaf by the logits is written by hand, here and in the passes; that
of an objective is not. docs/method.md §2 has the algebra. GEMMs and the loop over blocks are in
fused.py.

N rows of a micro-batch, C rows of a block, V columns of this rank's vocabulary shard, J looked-up
columns of a row (the target first, then stop ids), K columns of a support, G golden rows of a
block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stable_opd_mcore.losses.output_head import Head, ModelTensors
from stable_opd_mcore.losses.stop_tokens import MergedStops, merge_stops_, target_logprobs
from stable_opd_mcore.losses.token_losses import NO_SCORES, Rows, Terms, token_losses
from stable_opd_mcore.losses.torch_ops import DenseTerm, Normaliser, ShardSums, SparseColumns
from stable_opd_mcore.losses.vocabulary_sums import (
    GoldenLikelihood,
    PairStatistics,
    Statistics,
    jsd_sums_of,
    merge_shards,
    operations,
)
from stable_opd_mcore.records import LossOutput, MicroBatch

TAIL_FLOOR = 1e-5  # least probability of the tokens outside a support


class Leaves(NamedTuple):
    """The numbers of a block through which the logits enter the loss, or its gradient by them."""

    target_CJ: Tensor  # divided logits at the looked-up columns
    log_sum_C: Tensor  # log of the sum of e^(divided logit - the row's maximum)
    divergence_C: Tensor | None = None  # divergence from the teacher, over the vocabulary
    support_CK: Tensor | None = None  # divided logits on the support
    kl_reference_C: Tensor | None = None
    golden_G: Tensor | None = None  # log-probabilities of golden tokens at temperature 1


class Support(NamedTuple):
    """The K ids of each row over which student and teacher are compared."""

    ids_CK: Tensor
    student_CK: Tensor  # divided logits
    teacher_CK: Tensor  # divided logits, or the log-probabilities that the teacher gave


@dataclass(frozen=True)
class Block:
    """A block of rows: its logits [C, V], undivided by the temperature, and their sums."""

    terms: Terms
    batch: MicroBatch
    head: Head
    logits: ModelTensors
    ids_CJ: Tensor
    at_ids: ModelTensors  # divided logits at ids_CJ
    support: Support | None
    student: Statistics
    against_reference: PairStatistics | None
    against_teacher: PairStatistics | None
    teacher: Statistics | None  # sums of its own logits, before stop ids are merged
    merged: MergedStops | None  # the stop ids, where they are one outcome in the logits
    golden: GoldenLikelihood | None  # golden rows, where the temperature is not 1

    @classmethod
    def of(
        cls,
        terms: Terms,
        batch: MicroBatch,
        head: Head,
        logits: ModelTensors,
        ids_CJ: Tensor,
        golden_rows: Tensor,
    ) -> Block:
        """The sums of a block over all shards. Merges the stop ids in the logits, where the terms
        do.
        """
        scale = 1.0 / terms.temperature
        at_ids = _look_up(logits, ids_CJ, head)
        teacher = None if logits.teacher is None else _shard_sums(logits.teacher, None, scale)
        golden = None
        if len(golden_rows):
            golden = GoldenLikelihood.of(logits.student, golden_rows, batch.targets_N, head)
        merged = None
        if terms.merged_ids:
            merged = merge_stops_(logits, terms.merged_ids, scale, head)
        support_ids_CK = _support_ids(terms, batch, head, logits.student)
        at_support = _look_up(logits._replace(reference=None), support_ids_CK, head)
        if merged is not None:
            merged.remove_(logits, head)
        student_only, with_reference, with_teacher = _compared_sums(terms, logits, merged)
        (student_only, with_reference, with_teacher, teacher), columns = merge_shards(
            (student_only, with_reference, with_teacher, teacher), (*at_ids, *at_support), head
        )
        if scale != 1:
            columns = [x if x is None else x * scale for x in columns]
        against_reference = None if with_reference is None else PairStatistics(with_reference)
        against_teacher = None
        if with_teacher is not None:
            against_teacher = _against_teacher(with_teacher, terms, logits, merged, head)
        student = against_reference or against_teacher
        if student is None:
            assert student_only is not None
            student = Statistics(student_only)
        support = None
        if support_ids_CK is not None:
            at_support = ModelTensors._make(columns[len(at_ids) :])
            support = _support(support_ids_CK, at_support, batch, merged, scale)
        return cls(
            terms=terms,
            batch=batch,
            head=head,
            logits=logits,
            ids_CJ=ids_CJ,
            at_ids=ModelTensors._make(columns[: len(at_ids)]),
            support=support,
            student=student,
            against_reference=against_reference,
            against_teacher=against_teacher,
            teacher=None if teacher is None else Statistics(teacher),
            merged=merged,
            golden=golden,
        )

    @property
    def leaves(self) -> Leaves:
        terms, divergence_C = self.terms, None
        if self.against_teacher is not None and terms.dense_divergence is not None:
            beta = terms.settings.jsd_beta
            divergence_C = self.against_teacher.divergence(terms.dense_divergence, beta)
        reference = self.against_reference
        return Leaves(
            target_CJ=self.at_ids.student,
            log_sum_C=self.student.normaliser.log_sum_C,
            divergence_C=divergence_C,
            support_CK=None if self.support is None else self.support.student_CK,
            kl_reference_C=None if reference is None else reference.reverse_kl_C,
            golden_G=None if self.golden is None else self.golden.logprob_G,
        )

    def rows(self, leaves: Leaves, returns_C: Tensor | None = None) -> Rows:
        """What the loss reads, differentiable in the leaves."""
        normaliser = Normaliser(self.student.normaliser.maximum_C, leaves.log_sum_C)
        rows = Rows.of(self.batch, *target_logprobs(leaves.target_CJ, normaliser, self.ids_CJ))
        likelihood_C = rows.likelihood
        if self.golden is not None and leaves.golden_G is not None:
            likelihood_C = likelihood_C.index_copy(0, self.golden.rows_G, leaves.golden_G)
        given, divergence_C = self.batch.teacher or NO_SCORES, leaves.divergence_C
        support_CK = teacher_support_CK = None
        if self.support is not None and leaves.support_CK is not None:
            divergence_C = self._support_divergence(self.support, leaves.support_CK, normaliser)
            if self.terms.divergence == "teacher_support":
                support_CK = normaliser.log_softmax(leaves.support_CK)
                teacher_support_CK = given.topk_logprobs_NK
        teacher_C, reference_C = given.logprob_N, (self.batch.reference or NO_SCORES).logprob_N
        if self.teacher is not None and self.at_ids.teacher is not None:
            teacher_C, _ = target_logprobs(
                self.at_ids.teacher, self.teacher.normaliser, self.ids_CJ
            )
        if self.against_reference is not None and self.at_ids.reference is not None:
            target_C1 = self.at_ids.reference[:, :1]
            reference_C = self.against_reference.other.log_softmax(target_C1)[:, 0]
        entropy_C, teacher = self.student.entropy_C, self.against_teacher
        if self.merged is not None:
            entropy_C = self.merged.token_entropy(self.student, self.terms.temperature)
        return replace(
            rows,
            likelihood=likelihood_C,
            divergence=divergence_C,
            support=support_CK,
            teacher_support=teacher_support_CK,
            kl_reference=leaves.kl_reference_C,
            teacher_logprob=teacher_C,
            reference_logprob=reference_C,
            kl_teacher=None if teacher is None else teacher.reverse_kl_C,
            returns=returns_C,
            entropy=entropy_C,
            teacher_entropy=None if self.teacher is None else self.teacher.entropy_C,
        )

    def _support_divergence(
        self, support: Support, student_CK: Tensor, student: Normaliser
    ) -> Tensor:
        teacher_CK = support.teacher_CK
        if self.terms.settings.tail:
            student_CK = with_tail(student.log_softmax(student_CK))
            if self.teacher is not None:
                teacher_CK = self.teacher.normaliser.log_softmax(teacher_CK)
            teacher_CK = with_tail(teacher_CK)
        return support_kl(student_CK, teacher_CK)

    def differentiate(self, returns_C: Tensor | None) -> tuple[LossOutput, Leaves]:
        """Results of the rows, and the gradient of their loss by each leaf."""
        with torch.enable_grad():
            leaves = Leaves._make(
                x if x is None else x.detach().requires_grad_() for x in self.leaves
            )
            output = token_losses(self.terms, self.rows(leaves, returns_C), self.batch)
            inputs = [x for x in leaves if x is not None]
            found = iter(torch.autograd.grad(output.loss.sum(), inputs, materialize_grads=True))
        values: dict[str, Any] = {
            name: x if x is None else x.detach() for name, x in vars(output).items()
        }
        gradients = Leaves._make(x if x is None else next(found) for x in leaves)
        return LossOutput(**values), gradients

    def write_gradient_(self, by: Leaves) -> Tensor:
        """d loss / d student logits, written over them, from the loss's gradient by the leaves."""
        head, logits_CV, scale = self.head, self.logits.student, 1.0 / self.terms.temperature
        merged, support = self.merged, self.support
        columns_CJ, here_CJ = head.local_columns(self.ids_CJ)
        sparse = SparseColumns(columns_CJ.masked_fill(~here_CJ, -1), by.target_CJ)
        # log_sum has the gradient p, and write_gradient_ subtracts p times its argument.
        rest = (self.student.normaliser, -by.log_sum_C)
        dense = self._dense_terms(by, self.logits)
        operations(logits_CV).write_gradient_(logits_CV, *rest, sparse, dense, scale)
        if support is not None and by.support_CK is not None:
            head.scatter_add_(logits_CV, support.ids_CK, by.support_CK * scale)
        if merged is not None:
            at_outcome_C1 = torch.zeros_like(by.target_CJ[:, :1])
            if support is not None and by.support_CK is not None:
                is_outcome_CK = support.ids_CK == merged.ids[0]
                at_outcome_C1 = (by.support_CK * is_outcome_CK).sum(1, keepdim=True)
            # The target may be one of the stop ids, whose columns are written again.
            is_target_CJ = self.ids_CJ[:, 1:] == self.ids_CJ[:, :1]
            at_ids_CJ = by.target_CJ[:, 1:] + by.target_CJ[:, :1] * is_target_CJ
            dense = self._dense_terms(by, merged.logits)
            outcome = (*rest, at_outcome_C1, at_ids_CJ * scale, dense, scale, head)
            merged.write_gradient_(logits_CV, *outcome)
        if self.golden is not None and by.golden_G is not None:
            self.golden.add_gradient_(logits_CV, by.golden_G, head)
        return logits_CV

    def _dense_terms(self, by: Leaves, logits: ModelTensors) -> list[DenseTerm]:
        """The full-vocabulary parts of the gradient; at most one is not "reverse"."""
        found: list[DenseTerm] = []
        reference, teacher = self.against_reference, self.against_teacher
        if reference is not None and by.kl_reference_C is not None:
            assert logits.reference is not None
            found.append(reference.term("reverse", logits.reference, by.kl_reference_C))
        kind, beta = self.terms.dense_divergence, self.terms.settings.jsd_beta
        if teacher is not None and kind is not None and by.divergence_C is not None:
            assert logits.teacher is not None
            found.append(teacher.term(kind, logits.teacher, by.divergence_C, beta))
        return found


# ---- parts of Block.of


def _look_up(logits: ModelTensors, ids_CJ: Tensor | None, head: Head) -> list[Tensor | None]:
    """This shard's part of each model's logits at `ids_CJ`, None for each without ids."""
    return [None if x is None or ids_CJ is None else head.gather_columns(x, ids_CJ) for x in logits]


def _shard_sums(logits_CV: Tensor, other_CV: Tensor | None, scale: float) -> ShardSums:
    return operations(logits_CV).shard_sums(logits_CV, other_CV, scale)


def _compared_sums(
    terms: Terms, logits: ModelTensors, merged: MergedStops | None
) -> tuple[ShardSums | None, ShardSums | None, ShardSums | None]:
    """This shard's sums of the student by itself, with the reference, and with the teacher; by
    itself only where it is compared with neither.
    """
    scale = 1.0 / terms.temperature

    def sums(other_CV: Tensor | None, other_C1: Tensor | None) -> ShardSums:
        found = _shard_sums(logits.student, other_CV, scale)
        return found if merged is None else merged.add_to(found, other_C1, scale)

    outcomes = logits if merged is None else merged.logits
    student_only = reference = teacher = None
    if terms.reference == "exact":
        reference = sums(logits.reference, outcomes.reference)
    if terms.compares_teacher:
        teacher = sums(logits.teacher, outcomes.teacher)
    if reference is None and teacher is None:
        student_only = sums(None, None)
    return student_only, reference, teacher


def _support_ids(terms: Terms, batch: MicroBatch, head: Head, student_CV: Tensor) -> Tensor | None:
    if terms.divergence == "teacher_support":
        return (batch.teacher or NO_SCORES).topk_ids_NK
    if terms.divergence == "student_support":
        return head.top_k(student_CV, terms.settings.top_k)[1]
    return None


def _support(
    ids_CK: Tensor,
    at_support: ModelTensors,
    batch: MicroBatch,
    merged: MergedStops | None,
    scale: float,
) -> Support:
    """The support from the divided logits at its ids; the merged outcome gets its exact logit."""
    if merged is not None:
        at_support = merged.exact(ids_CK, at_support, scale)
    teacher_CK = at_support.teacher
    if teacher_CK is None:
        teacher_CK = (batch.teacher or NO_SCORES).topk_logprobs_NK
    assert teacher_CK is not None
    return Support(ids_CK, at_support.student, teacher_CK)


def _against_teacher(
    sums: ShardSums, terms: Terms, logits: ModelTensors, merged: MergedStops | None, head: Head
) -> PairStatistics:
    pair = PairStatistics(sums)
    if terms.divergence != "jsd":
        return pair
    outcome = merged.logits if merged is not None and merged.here else None
    options = (terms.settings.jsd_beta, 1.0 / terms.temperature, head)
    return replace(pair, jsd_sums_C2=jsd_sums_of(pair, logits, outcome, *options))


# ---- divergence on a support


def with_tail(logprob_CK: Tensor) -> Tensor:
    """[C, K + 1]: with log p of all other columns, at least log TAIL_FLOOR (error there: 1 %)."""
    rest_C1 = 1 - logprob_CK.exp().sum(1, keepdim=True)
    return torch.cat([logprob_CK, rest_C1.clamp(min=TAIL_FLOOR).log()], dim=1)


def support_kl(student_CK: Tensor, teacher_CK: Tensor) -> Tensor:
    """KL(p || q) [C], both renormalised over K columns; constants added to the logits cancel."""
    log_p = student_CK.log_softmax(1)
    return (log_p.exp() * (log_p - teacher_CK.to(log_p.dtype).log_softmax(1))).sum(1)
