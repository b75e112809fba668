"""The numbers per row through which the logits enter the loss, and their gradients by the logits.

A block of rows has logits of all models, their sums over the vocabulary, and from them its leaves.
`differentiate` evaluates the loss (token_losses.py) and takes its gradient by each leaf from
autograd, over tensors of [rows]. `write_gradient_` turns these into the gradient by the logits, in
one pass. The gradient of each leaf is written by hand, here and in the passes; that of an objective
is not. docs/method.md §2 has the algebra. Not here: GEMMs and the loop over blocks (fused.py).

C rows of a block, V columns of this rank's vocabulary shard, J looked-up columns of a row (the
target first, then stop ids), K columns of a support, G golden rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.stop_tokens import (
    MergedStops,
    compared_sums,
    merge_stops_,
    target_logprobs,
)
from stable_opd_mcore.losses.token_losses import NO_SCORES, Rows, Terms, token_losses
from stable_opd_mcore.losses.torch_ops import DenseTerm, Normaliser, SparseColumns
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
    log_sum_C: Tensor  # of e^(divided logit - the row's maximum)
    divergence_C: Tensor | None = None  # from the teacher, over the vocabulary
    support_CK: Tensor | None = None  # divided logits on the support
    kl_reference_C: Tensor | None = None
    golden_G: Tensor | None = None  # log-probabilities of golden tokens at temperature 1


@dataclass(frozen=True)
class Block:
    """A block of rows: its logits [C, V], undivided by the temperature, and their sums."""

    terms: Terms
    batch: MicroBatch
    head: Head
    logits: Mapping[str, Tensor]  # of all models
    ids_CJ: Tensor
    compared: Mapping[str, Statistics]  # the student with each other model, or "" alone
    teacher: Statistics | None  # sums of its own logits, before stop ids are merged
    at: Mapping[str, Tensor]  # divided logits of each model at ids_CJ and on the support
    support_ids_CK: Tensor | None
    merged: MergedStops | None  # the stop ids, where they are one outcome in the logits
    jsd_sums_C2: Tensor | None  # of a second pass for the divergence "jsd"
    golden: GoldenLikelihood | None  # of golden rows, where the temperature is not 1

    @classmethod
    def of(
        cls,
        terms: Terms,
        batch: MicroBatch,
        head: Head,
        logits: dict[str, Tensor],
        ids_CJ: Tensor,
        golden_rows: Tensor | None,
    ) -> Block:
        """Merges the stop ids in the logits, where the terms do."""
        student_CV, scale = logits["student"], 1.0 / terms.temperature
        looked_up = {name: head.gather_columns(x, ids_CJ) for name, x in logits.items()}
        alone = []
        if "teacher" in logits:
            alone = [operations(student_CV).shard_sums(logits["teacher"], None, scale)]
        golden = None
        if golden_rows is not None and len(golden_rows):
            golden = GoldenLikelihood.of(student_CV, golden_rows, batch.targets_N, head)
        merged = None
        if terms.merged_ids:
            merged = merge_stops_(logits, terms.merged_ids, scale, head)
        support_ids_CK = _support_ids(terms, batch, head, student_CV)
        with_support = [name for name in ("student", "teacher") if name in logits]
        if support_ids_CK is not None:
            for name in with_support:
                looked_up[f"{name} support"] = head.gather_columns(logits[name], support_ids_CK)
        others = terms.compared_models
        pairs = compared_sums(logits, others, merged, head, scale)
        statistics, whole = merge_shards([*pairs, *alone], list(looked_up.values()), head)
        at = {k: x if scale == 1 else x * scale for k, x in zip(looked_up, whole, strict=True)}
        if merged is not None and support_ids_CK is not None:
            for name in with_support:
                key = f"{name} support"
                at[key] = merged.exact(support_ids_CK, at[key], name, scale)
        compared = dict(zip(others or ("",), statistics, strict=False))
        pair, jsd_sums_C2 = compared.get("teacher"), None
        if isinstance(pair, PairStatistics) and terms.divergence == "jsd":
            options = (logits["teacher"], terms.settings.jsd_beta, scale, head)
            outcome = None
            if merged is not None and merged.here:
                outcome = (merged.logit_C1["student"], merged.logit_C1["teacher"])
            jsd_sums_C2 = jsd_sums_of(pair, student_CV, *options, outcome)
        return cls(
            terms=terms,
            batch=batch,
            head=head,
            logits=logits,
            ids_CJ=ids_CJ,
            compared=compared,
            teacher=statistics[-1] if alone else None,
            at=at,
            support_ids_CK=support_ids_CK,
            merged=merged,
            jsd_sums_C2=jsd_sums_C2,
            golden=golden,
        )

    @property
    def student(self) -> Statistics:
        return next(iter(self.compared.values()))

    def pair(self, other: str) -> PairStatistics | None:
        """The student, compared with another model over the full vocabulary."""
        return cast("PairStatistics | None", self.compared.get(other))

    @property
    def leaves(self) -> Leaves:
        terms = self.terms
        reference, teacher, divergence_C = self.pair("reference"), self.pair("teacher"), None
        if teacher is not None and terms.divergence is not None:
            beta = terms.settings.jsd_beta
            divergence_C = teacher.divergence(terms.divergence, self.jsd_sums_C2, beta)
        return Leaves(
            target_CJ=self.at["student"],
            log_sum_C=self.student.normaliser.log_sum_C,
            divergence_C=divergence_C,
            support_CK=self.at.get("student support"),
            kl_reference_C=None if reference is None else reference.reverse_kl_C,
            golden_G=None if self.golden is None else self.golden.logprob_G,
        )

    def rows(self, leaves: Leaves, returns_C: Tensor | None = None) -> Rows:
        """What the loss reads, differentiable in the leaves."""
        normaliser = Normaliser(self.student.normaliser.maximum_C, leaves.log_sum_C)
        logprob_C, token_logprob_C = target_logprobs(leaves.target_CJ, normaliser, self.ids_CJ)
        likelihood_C = token_logprob_C
        if self.golden is not None and leaves.golden_G is not None:
            likelihood_C = likelihood_C.index_copy(0, self.golden.rows_G, leaves.golden_G)
        given, divergence_C = self.batch.teacher or NO_SCORES, leaves.divergence_C
        support_CK = None
        if leaves.support_CK is not None:
            teacher_CK = self.at.get("teacher support", given.topk_logprobs_NK)
            assert teacher_CK is not None
            student_CK = leaves.support_CK
            if self.terms.settings.tail:
                student_CK = with_tail(normaliser.log_softmax(student_CK))
                if self.teacher is not None:
                    teacher_CK = self.teacher.normaliser.log_softmax(teacher_CK)
                teacher_CK = with_tail(teacher_CK)
            divergence_C = support_kl(student_CK, teacher_CK)
            if self.terms.divergence == "teacher_support":
                support_CK = normaliser.log_softmax(leaves.support_CK)
        teacher_C, reference_C = given.logprob_N, (self.batch.reference or NO_SCORES).logprob_N
        if self.teacher is not None:
            normaliser = self.teacher.normaliser
            teacher_C, _ = target_logprobs(self.at["teacher"], normaliser, self.ids_CJ)
        reference, teacher = self.pair("reference"), self.pair("teacher")
        if reference is not None:
            reference_C = reference.other.log_softmax(self.at["reference"][:, :1])[:, 0]
        entropy_C = self.student.entropy_C
        if self.merged is not None:
            entropy_C = self.merged.token_entropy(self.student, self.terms.temperature)
        return Rows.of(
            self.batch,
            logprob_C,
            token_logprob_C,
            likelihood=likelihood_C,
            divergence=divergence_C,
            support=support_CK,
            teacher_support=None if support_CK is None else given.topk_logprobs_NK,
            kl_reference=leaves.kl_reference_C,
            teacher_logprob=teacher_C,
            reference_logprob=reference_C,
            kl_teacher=None if teacher is None else teacher.reverse_kl_C,
            returns=returns_C,
            entropy=entropy_C,
            teacher_entropy=None if self.teacher is None else self.teacher.entropy_C,
        )

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
        head, logits_CV, scale = self.head, self.logits["student"], 1.0 / self.terms.temperature
        merged, support_ids_CK = self.merged, self.support_ids_CK
        dense = self._dense_terms(by)
        columns_CJ, here_CJ = head.local_columns(self.ids_CJ)
        sparse = SparseColumns(columns_CJ.masked_fill(~here_CJ, -1), by.target_CJ)
        # log_sum has the gradient p, and write_gradient_ subtracts p times its argument.
        rest = (self.student.normaliser, -by.log_sum_C)
        write_gradient_ = operations(logits_CV).write_gradient_
        write_gradient_(logits_CV, *rest, sparse, list(dense.values()), scale)
        if support_ids_CK is not None and by.support_CK is not None:
            head.scatter_add_(logits_CV, support_ids_CK, by.support_CK * scale)
        if merged is not None:
            at_outcome_C1 = torch.zeros_like(by.target_CJ[:, :1])
            if support_ids_CK is not None and by.support_CK is not None:
                is_outcome_CK = support_ids_CK == merged.ids[0]
                at_outcome_C1 = (by.support_CK * is_outcome_CK).sum(1, keepdim=True)
            # The target may be one of the stop ids, whose columns are written again.
            is_target_CJ = self.ids_CJ[:, 1:] == self.ids_CJ[:, :1]
            at_ids_CJ = by.target_CJ[:, 1:] + by.target_CJ[:, :1] * is_target_CJ
            outcome = (*rest, at_outcome_C1, at_ids_CJ * scale, dense, scale, head)
            merged.write_gradient_(logits_CV, *outcome)
        if self.golden is not None and by.golden_G is not None:
            self.golden.add_gradient_(logits_CV, by.golden_G, head)
        return logits_CV

    def _dense_terms(self, by: Leaves) -> dict[str, DenseTerm]:
        """The full-vocabulary parts of the gradient, per model; at most one is not "reverse"."""
        found, kind, beta = dict[str, DenseTerm](), self.terms.divergence, 0.5
        reference, teacher = self.pair("reference"), self.pair("teacher")
        if reference is not None and by.kl_reference_C is not None:
            weighted = (self.logits["reference"], by.kl_reference_C)
            found["reference"] = reference.term("reverse", *weighted, None, beta)
        if teacher is not None and kind is not None and by.divergence_C is not None:
            weighted, beta = (self.logits["teacher"], by.divergence_C), self.terms.settings.jsd_beta
            found["teacher"] = teacher.term(kind, *weighted, self.jsd_sums_C2, beta)
        return found


def _support_ids(terms: Terms, batch: MicroBatch, head: Head, student_CV: Tensor) -> Tensor | None:
    if terms.divergence == "teacher_support":
        return (batch.teacher or NO_SCORES).topk_ids_NK
    if terms.divergence == "student_support":
        return head.top_k(student_CV, terms.settings.top_k)[1]
    return None


def with_tail(logprob_CK: Tensor) -> Tensor:
    """[C, K + 1]: with the log-probability of all other columns together, at least log TAIL_FLOOR.

    The rest is what K fp32 numbers leave of 1, with an error of about 1e-7: 1 % at the floor.
    """
    rest_C1 = 1 - logprob_CK.exp().sum(1, keepdim=True)
    return torch.cat([logprob_CK, rest_C1.clamp(min=TAIL_FLOOR).log()], dim=1)


def support_kl(student_CK: Tensor, teacher_CK: Tensor) -> Tensor:
    """KL(p || q) [C], both renormalised over K columns; constants added to the logits cancel."""
    log_p = student_CK.log_softmax(1)
    return (log_p.exp() * (log_p - teacher_CK.to(log_p.dtype).log_softmax(1))).sum(1)
