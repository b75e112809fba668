"""One chunk of rows: from its sums to per-token coefficients, and from those to the gradient over
its logits.

Coefficients may depend on the chunk's own sums (the advantage needs the student's
log-probability), so the sums come first, then coefficients, then the gradient (METHOD §2: every
term is linear in per-token coefficients). C rows, V columns of this rank's shard. Not here: where
logits come from and where gradients go (fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stable_opd_mcore.losses.advantages import clipped_surrogate
from stable_opd_mcore.losses.head import Head
from stable_opd_mcore.losses.lookup import Support, Target
from stable_opd_mcore.losses.passes import (
    DenseTerm,
    PairStatistics,
    SparseColumns,
    jsd_sums,
    write_gradient_,
)
from stable_opd_mcore.losses.terms import DENSE, Rows, Terms


@dataclass(frozen=True)
class Chunk:
    """A chunk's logits, undivided by the temperature, and what is known of them."""

    head: Head
    terms: Terms
    rows: Rows
    logits_CV: Tensor
    reference_CV: Tensor | None  # where the exact KL to the reference is part of the loss
    teacher_CV: Tensor | None  # where the student meets the teacher over the full vocabulary
    student: PairStatistics
    reference: PairStatistics | None
    teacher: PairStatistics | None
    target: Target
    support: Support | None

    def finish(self, found: dict[str, Tensor], rows: slice, wants_gradient: bool) -> Tensor | None:
        """Write per-token results into found[...][rows]; return d loss / d logits [C, V] in the
        logits' memory.

        The result is with respect to logits before the temperature. None when no gradient is
        wanted.
        """
        found["logprob"][rows] = self.target.logprob_C
        found["entropy"][rows] = self.student.entropy_C
        if self.teacher is not None and self.teacher.student_to_other_C is not None:
            found["kl_teacher"][rows] = self.teacher.student_to_other_C
        elif self.rows.teacher_logprob is not None:
            found["kl_teacher"][rows] = self.target.logprob_C - self.rows.teacher_logprob
        class_C, policy_term = self._policy(found, rows)
        token_C, reference_term = self._reference(found, rows)
        found["sft"][rows] = _weighted(self.rows.sft_weight, -self.target.token_logprob_C)
        token_C = token_C - self.rows.sft_weight
        if not wants_gradient:
            return None

        scale = 1.0 / self.terms.temperature
        dense = [term for term in (reference_term, policy_term) if term is not None]
        at_target_CJ = self.target.share_CJ * class_C[:, None]
        at_target_CJ[:, 0] += token_C
        columns_CJ, here_CJ = self.head.local_columns(self.target.ids_CJ)
        sparse = SparseColumns(columns_CJ.masked_fill(~here_CJ, -1), at_target_CJ)
        probability_C = class_C + token_C
        write_gradient_(self.logits_CV, self.student.student, probability_C, sparse, dense, scale)
        if self.support is not None:
            weight_C1 = self.rows.pg_weight[:, None] * scale
            gradient_CK = self.support.gradient_CK * weight_C1
            self.head.scatter_add_(self.logits_CV, self.support.ids_CK, gradient_CK)
        return self.logits_CV

    def _policy(self, found: dict[str, Tensor], rows: slice) -> tuple[Tensor, DenseTerm | None]:
        """d loss / d log pi of the target (or class), and the full-vocabulary term if any."""
        weight_C = self.rows.pg_weight
        nothing_C = torch.zeros_like(self.target.logprob_C)
        if self.terms.advantage is not None:
            return self._surrogate(found, rows), None
        if self.terms.divergence is None:
            return nothing_C, None
        if self.terms.divergence not in DENSE:
            assert self.support is not None
            found["pg"][rows] = _weighted(weight_C, self.support.value_C)
            return nothing_C, None
        value_C, term = self._divergence()
        found["pg"][rows] = _weighted(weight_C, value_C)
        return nothing_C, term

    def _surrogate(self, found: dict[str, Tensor], rows: slice) -> Tensor:
        terms, given = self.terms, self.rows
        assert terms.advantage is not None
        advantage_C = given.advantage
        if terms.discount == 0:
            behaviour_C = self.target.logprob_C if given.old_logprob is None else given.old_logprob
            advantage_C = terms.advantage(
                behaviour_C, given.teacher_logprob, given.advantage, terms.settings
            )
        assert advantage_C is not None
        if terms.settings.control_variate:
            assert self.teacher is not None and self.teacher.student_to_other_C is not None
            # A baseline of the present state alone, so it comes after the return-to-go.
            advantage_C = advantage_C + self.teacher.student_to_other_C
        loss_C, derivative_C, clipped_C = clipped_surrogate(
            self.target.logprob_C, given.old_logprob, advantage_C, terms.clip
        )
        found["pg"][rows] = _weighted(given.pg_weight, loss_C)
        found["advantage"][rows] = advantage_C.masked_fill(given.pg_weight == 0, 0)
        found["clipped"][rows] = (clipped_C & (given.pg_weight != 0)).to(loss_C.dtype)
        return _weighted(given.pg_weight, derivative_C)

    def _divergence(self) -> tuple[Tensor, DenseTerm]:
        """Value and gradient term of the full-vocabulary divergence to the teacher."""
        teacher, kind, beta = self.teacher, self.terms.divergence, self.terms.jsd_beta
        assert teacher is not None and teacher.other is not None and self.teacher_CV is not None
        assert teacher.student_to_other_C is not None and teacher.other_to_student_C is not None
        assert kind in DENSE
        weight_C = self.rows.pg_weight
        if kind == "reverse":
            return teacher.student_to_other_C, teacher.reverse_term(self.teacher_CV, weight_C)
        if kind == "forward":
            value_C = teacher.other_to_student_C
            return value_C, DenseTerm(kind, self.teacher_CV, teacher.other, weight_C, value_C)
        scale = 1.0 / self.terms.temperature
        teacher_to_mix_C, student_to_mix_C = jsd_sums(
            self.logits_CV, self.teacher_CV, teacher, beta, scale, self.head
        )
        value_C = beta * teacher_to_mix_C + (1 - beta) * student_to_mix_C
        term = DenseTerm(kind, self.teacher_CV, teacher.other, weight_C, student_to_mix_C, beta)
        return value_C, term

    def _reference(self, found: dict[str, Tensor], rows: slice) -> tuple[Tensor, DenseTerm | None]:
        """The KL to the reference: d loss / d log pi of the target (k3), or a dense term."""
        weight_C = self.rows.kl_weight
        nothing_C = torch.zeros_like(self.target.logprob_C)
        if self.terms.reference == "none":
            return nothing_C, None
        if self.terms.reference == "k3":
            assert self.rows.reference_logprob is not None
            log_ratio_C = self.rows.reference_logprob - self.target.token_logprob_C
            ratio_C = log_ratio_C.exp()
            found["kl_reference"][rows] = ratio_C - log_ratio_C - 1
            found["kl"][rows] = _weighted(weight_C, ratio_C - log_ratio_C - 1)
            return _weighted(weight_C, 1 - ratio_C), None
        reference = self.reference
        assert reference is not None and reference.student_to_other_C is not None
        assert self.reference_CV is not None
        value_C = reference.student_to_other_C
        found["kl_reference"][rows] = value_C
        found["kl"][rows] = _weighted(weight_C, value_C)
        return nothing_C, reference.reverse_term(self.reference_CV, weight_C)


def _weighted(weight_C: Tensor, value_C: Tensor) -> Tensor:
    """weight * value, and exactly zero where the weight is, whatever the value."""
    return (weight_C * value_C).masked_fill(weight_C == 0, 0)
