"""One chunk of rows: from its sums to per-token coefficients, and from those to the gradient over
its logits.

Coefficients may depend on the chunk's own sums (the advantage needs the student's
log-probability), so the sums come first, then coefficients, then the gradient (METHOD §2: every
term is linear in per-token coefficients). C rows, V columns of this rank's shard. Not here: where
logits come from and where gradients go (fused.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stable_opd_mcore.losses.advantages import clipped_surrogate
from stable_opd_mcore.losses.head import Head
from stable_opd_mcore.losses.lookup import Support, Target
from stable_opd_mcore.losses.outcomes import Outcome
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
    logits: Mapping[str, Tensor]  # [C, V] of "student" and where needed "reference", "teacher"
    student: PairStatistics
    reference: PairStatistics | None  # where the exact KL to the reference is part of the loss
    teacher: PairStatistics | None  # where the student meets the teacher over the full vocabulary
    target: Target
    reference_logprob_C: Tensor | None  # of the target token
    teacher_entropy_C: Tensor | None  # where its logits are here
    support: Support | None
    merged: Outcome | None  # the stop ids, where they are one outcome in `logits`

    def finish(self, found: dict[str, Tensor], rows: slice, wants_gradient: bool) -> Tensor | None:
        """Write per-token results into found[...][rows]; return d loss / d logits [C, V] in the
        logits' memory.

        The result is with respect to logits before the temperature. None when no gradient is
        wanted.
        """
        found["logprob"][rows] = self.target.logprob_C
        found["token_logprob"][rows] = self.target.token_logprob_C
        found["entropy"][rows] = self._entropy()
        if self.teacher is not None and self.teacher.student_to_other_C is not None:
            found["kl_teacher"][rows] = self.teacher.student_to_other_C
        elif self.rows.teacher_logprob is not None:
            found["kl_teacher"][rows] = self.target.logprob_C - self.rows.teacher_logprob
        for name, value_C in (
            ("reference_logprob", self.reference_logprob_C),
            ("teacher_logprob", self.rows.teacher_logprob),
            ("teacher_entropy", self.teacher_entropy_C),
        ):
            if value_C is not None:
                found[name][rows] = value_C
        class_C, policy_term = self._policy(found, rows)
        token_C, reference_term = self._reference(found, rows)
        found["sft"][rows] = _weighted(self.rows.sft_weight, -self.target.token_logprob_C)
        token_C = token_C - self.rows.sft_weight
        if not wants_gradient:
            return None

        terms = {"reference": reference_term, "teacher": policy_term}
        dense = {name: term for name, term in terms.items() if term is not None}
        at_target_CJ = self.target.share_CJ * class_C[:, None]
        at_target_CJ[:, 0] += token_C
        return self._write_gradient(class_C + token_C, at_target_CJ, dense)

    @property
    def old_logprob_C(self) -> Tensor | None:
        """log pi_old as the surrogate compares it; None: pi_old is the present policy.

        Of a stop token whose class's probability under pi_old nobody knows, the token's share of
        the class is taken to be the present one. The ratio is then that of the token, whose mean
        over pi_old is that of the class: still exact, and 1 on policy.
        """
        given, target = self.rows, self.target
        if given.old_logprob is not None or given.old_token_logprob is None:
            return given.old_logprob
        return given.old_token_logprob + (target.logprob_C - target.token_logprob_C)

    def _entropy(self) -> Tensor:
        """The student's over its tokens, also where some of them are one outcome in its logits."""
        entropy_C, merged = self.student.entropy_C, self.merged
        if merged is None:
            return entropy_C
        logit_C1 = merged.logit_C1["student"] / self.terms.temperature
        probability_C1 = self.student.student.log_softmax(logit_C1).exp()
        return entropy_C + (probability_C1 * torch.special.entr(merged.share_CJ)).sum(1)

    def _write_gradient(
        self, logprob_gradient_C: Tensor, at_target_CJ: Tensor, dense: Mapping[str, DenseTerm]
    ) -> Tensor:
        """Overwrite the student's logits; `dense` by the model that the student meets."""
        logits_CV, head, student = self.logits["student"], self.head, self.student.student
        scale = 1.0 / self.terms.temperature
        columns_CJ, here_CJ = head.local_columns(self.target.ids_CJ)
        sparse = SparseColumns(columns_CJ.masked_fill(~here_CJ, -1), at_target_CJ)
        write_gradient_(logits_CV, student, logprob_gradient_C, sparse, list(dense.values()), scale)
        support, support_CK = self.support, None
        if support is not None:
            support_CK = support.gradient_CK * self.rows.pg_weight[:, None]
            head.scatter_add_(logits_CV, support.ids_CK, support_CK * scale)
        if self.merged is None:
            return logits_CV

        # The outcome by itself, as if it were a vocabulary of one column; in fp32, so that its
        # ids' columns are rounded once, too.
        merged = self.merged
        outcome_C1 = merged.logit_C1["student"].clone()
        at_outcome_C1 = torch.zeros_like(outcome_C1)
        if support is not None and support_CK is not None:
            at_outcome_C1[:, 0] = (support_CK * (support.ids_CK == merged.ids[0])).sum(1)
        sparse = SparseColumns(torch.zeros_like(self.target.ids_CJ[:, :1]), at_outcome_C1)
        terms = [replace(term, logits_CV=merged.logit_C1[name]) for name, term in dense.items()]
        write_gradient_(outcome_C1, student, logprob_gradient_C, sparse, terms, scale)
        merged.spread_(logits_CV, outcome_C1, self.target.ids_CJ, at_target_CJ * scale, head)
        return logits_CV

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

    def token_advantage(self) -> Tensor:
        """Rows.token_advantage under pi_old, or under the present policy where none is given."""
        old_logprob_C = self.old_logprob_C
        behaviour_C = self.target.logprob_C if old_logprob_C is None else old_logprob_C
        return self.rows.token_advantage(behaviour_C, self.terms)

    def _surrogate(self, found: dict[str, Tensor], rows: slice) -> Tensor:
        terms, given = self.terms, self.rows
        advantage_C = given.advantage if terms.discount > 0 else self.token_advantage()
        assert advantage_C is not None
        if terms.settings.control_variate:
            assert self.teacher is not None and self.teacher.student_to_other_C is not None
            # A baseline of the present state alone, so it comes after the return-to-go.
            advantage_C = advantage_C + self.teacher.student_to_other_C
        loss_C, derivative_C, clipped_C = clipped_surrogate(
            self.target.logprob_C, self.old_logprob_C, advantage_C, terms.clip
        )
        found["pg"][rows] = _weighted(given.pg_weight, loss_C)
        found["advantage"][rows] = advantage_C.masked_fill(given.pg_weight == 0, 0)
        found["clipped"][rows] = (clipped_C & (given.pg_weight != 0)).to(loss_C.dtype)
        return _weighted(given.pg_weight, derivative_C)

    def _divergence(self) -> tuple[Tensor, DenseTerm]:
        """Value and gradient term of the full-vocabulary divergence to the teacher."""
        teacher, kind, beta = self.teacher, self.terms.divergence, self.terms.jsd_beta
        assert teacher is not None and teacher.other is not None
        teacher_CV = self.logits["teacher"]
        assert teacher.student_to_other_C is not None and teacher.other_to_student_C is not None
        assert kind in DENSE
        weight_C = self.rows.pg_weight
        if kind == "reverse":
            return teacher.student_to_other_C, teacher.reverse_term(teacher_CV, weight_C)
        if kind == "forward":
            value_C = teacher.other_to_student_C
            return value_C, DenseTerm(kind, teacher_CV, teacher.other, weight_C, value_C)
        scale = 1.0 / self.terms.temperature
        teacher_to_mix_C, student_to_mix_C = jsd_sums(
            self.logits["student"], teacher_CV, teacher, beta, scale, self.head
        )
        value_C = beta * teacher_to_mix_C + (1 - beta) * student_to_mix_C
        term = DenseTerm(kind, teacher_CV, teacher.other, weight_C, student_to_mix_C, beta)
        return value_C, term

    def _reference(self, found: dict[str, Tensor], rows: slice) -> tuple[Tensor, DenseTerm | None]:
        """The KL to the reference: d loss / d log pi of the target (k3), or a dense term."""
        weight_C = self.rows.kl_weight
        nothing_C = torch.zeros_like(self.target.logprob_C)
        if self.terms.reference == "none":
            return nothing_C, None
        if self.terms.reference == "k3":
            assert self.reference_logprob_C is not None
            log_ratio_C = self.reference_logprob_C - self.target.token_logprob_C
            ratio_C = log_ratio_C.exp()
            found["kl_reference"][rows] = ratio_C - log_ratio_C - 1
            found["kl"][rows] = _weighted(weight_C, ratio_C - log_ratio_C - 1)
            return _weighted(weight_C, 1 - ratio_C), None
        reference = self.reference
        assert reference is not None and reference.student_to_other_C is not None
        value_C = reference.student_to_other_C
        found["kl_reference"][rows] = value_C
        found["kl"][rows] = _weighted(weight_C, value_C)
        return nothing_C, reference.reverse_term(self.logits["reference"], weight_C)


def _weighted(weight_C: Tensor, value_C: Tensor) -> Tensor:
    """weight * value, and exactly zero where the weight is, whatever the value."""
    return (weight_C * value_C).masked_fill(weight_C == 0, 0)
