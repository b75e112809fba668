"""Per-token coefficients of the loss: advantages, the clipped surrogate, the sampled KL, and how
each enters the gradient (docs/method.md §1-3); and from the sums of rows to their components.

Every function works on vectors over rows; none sees logits. Advantages are constants of the loss:
all inputs are detached. Not here: returns and advantages from rewards, which need the other tokens
(token_weights.py), and divergences over the vocabulary (vocabulary_sums.py).

N rows of a micro-batch, C rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor

from stable_opd_mcore.config.schema import AdvantageConfig
from stable_opd_mcore.losses.output_head import Head, require_same_columns
from stable_opd_mcore.losses.stop_tokens import (
    MergedStops,
    TargetColumns,
    TargetLogprobs,
    support_divergence,
)
from stable_opd_mcore.losses.vocabulary_sums import PairStatistics, Statistics, SupportDivergence
from stable_opd_mcore.records import LossOutput, MicroBatch, Scores

NO_OPTIONS = AdvantageConfig.model_validate({})
NO_SCORES = Scores(None)
SUPPORTS = ("teacher_support", "student_support")
K3_BOUND = 10.0  # log ratio up to which k3 is exponential

# (behaviour log-prob, teacher log-prob, advantage given with the sample, settings) -> advantage
AdvantageFunction = Callable[[Tensor, Tensor | None, Tensor | None, AdvantageConfig], Tensor]


@dataclass(frozen=True)
class Terms:
    """What an objective's loss is made of; its policy term is a surrogate or a divergence."""

    advantage: AdvantageFunction | None = None  # surrogate on the sampled token
    # of student and teacher at every visited prefix: one of SUPPORTS, or a kind of DenseTerm
    divergence: str | None = None
    settings: AdvantageConfig = NO_OPTIONS
    clip: float = 0.2
    discount: float = 0.0
    jsd_beta: float = 0.5
    top_k: int = 32
    reference: Literal["none", "exact", "k3", "k3+"] = "none"
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()  # one outcome in the comparison with the teacher

    @property
    def compared_models(self) -> tuple[str, ...]:
        """Models that the student is compared with over the full vocabulary."""
        dense = self.divergence is not None and self.divergence not in SUPPORTS
        reference = ("reference",) if self.reference == "exact" else ()
        return (*reference, "teacher") if dense or self.settings.control_variate else reference

    @property
    def teacher_logits(self) -> bool:
        """Whether the teacher's logits are made here, from its hidden states and head."""
        return "teacher" in self.compared_models or self.divergence == "student_support"

    @property
    def merged_ids(self) -> tuple[int, ...]:
        """Stop ids that are one outcome in every distribution of the loss; empty for none.

        Where only sampled tokens are compared with the teacher nothing is merged: the reference
        stops as the student does, and the KL to it then keeps the student's own stop token too.
        """
        compares = self.divergence is not None or self.settings.control_variate
        return self.stop_ids if compares else ()


def needed_heads(
    hidden_NH: Tensor,
    batch: MicroBatch,
    terms: Terms,
    student: Head,
    teacher: Head | None,
    reference: Head | None,
) -> dict[str, Head]:
    """Heads of the models whose logits the terms need; refuses missing scores and unfit heads."""
    count, heads = batch.targets_N.shape[0], {"student": student}
    if hidden_NH.shape[0] != count:
        raise ValueError(
            f"{hidden_NH.shape[0]} hidden states for {count} scored rows: "
            "select them with hidden_TH.index_select(0, microbatch.rows_N)"
        )
    for name, needed, head, scores in (
        ("teacher", terms.teacher_logits, teacher, batch.teacher),
        ("reference", terms.reference == "exact", reference, batch.reference),
    ):
        if not needed:
            continue
        if head is None or scores is None or scores.hidden_NH is None:
            raise ValueError(f"the loss needs the {name}'s hidden states and output head")
        require_same_columns(student, head, name)
        heads[name] = head
    sampled = terms.reference in ("k3", "k3+")
    if sampled and (batch.reference or NO_SCORES).logprob_N is None:
        raise ValueError(f"kl.estimator={terms.reference} needs the reference's log-probabilities")
    if terms.divergence == "teacher_support" and (batch.teacher or NO_SCORES).topk_ids_NK is None:
        raise ValueError("the loss needs the teacher's top-k ids and log-probabilities")
    return heads


@dataclass(frozen=True)
class Component:
    """One component of a block's loss, [C] each."""

    value_C: Tensor  # weighted
    logprob_gradient_C: Tensor  # d value / d log pi of the target (policy: or its stop class)
    kl_C: Tensor | None = None  # the divergence, unweighted
    advantage_C: Tensor | None = None
    clipped_C: Tensor | None = None


def old_logprob(batch: MicroBatch, target: TargetLogprobs) -> Tensor | None:
    """log pi_old [C] as the surrogate compares it; None: pi_old is the present policy.

    Where pi_old's probability of a stop class is unknown, the token's share of its class is taken
    from the present policy. The ratio is then that of the token, whose mean over pi_old is that of
    the class: still exact, and 1 on policy.
    """
    if batch.old_logprob_N is not None or batch.old_token_logprob_N is None:
        return batch.old_logprob_N
    return batch.old_token_logprob_N + (target.logprob_C - target.token_logprob_C)


def token_advantage(
    terms: Terms, batch: MicroBatch, behaviour_C: Tensor, teacher_logprob_C: Tensor | None
) -> Tensor:
    """A of every token by itself: no discounted sum, no baseline."""
    assert terms.advantage is not None
    given_C = batch.given_advantage_N
    return terms.advantage(behaviour_C, teacher_logprob_C, given_C, terms.settings)


def surrogate(
    batch: MicroBatch, target: TargetLogprobs, advantage_C: Tensor, clip: float
) -> Component:
    """The clipped surrogate on the sampled tokens."""
    weight_C = batch.pg_weight_N
    loss_C, derivative_C, clipped_C = clipped_surrogate(
        target.logprob_C, old_logprob(batch, target), advantage_C, clip
    )
    return Component(
        value_C=weighted(weight_C, loss_C),
        logprob_gradient_C=weighted(weight_C, derivative_C),
        advantage_C=advantage_C.masked_fill(weight_C == 0, 0),
        clipped_C=clipped_C & (weight_C != 0),
    )


def sampled_kl(
    estimator: str, batch: MicroBatch, logprob_C: Tensor, reference_logprob_C: Tensor
) -> Component:
    """The KL to the reference from the sampled token alone, log pi of it given
    (docs/method.md §2).

    "k3": r - log r - 1 with r = pi_ref / pi, linear beyond K3_BOUND. "k3+": its value, with the
    gradient of (log r)^2 / 2. Both are weighted by pi / pi_old, held constant, where pi_old is
    given.
    """
    log_ratio_C = reference_logprob_C - logprob_C
    bounded_C = log_ratio_C.clamp(max=K3_BOUND)
    ratio_C = bounded_C.exp()
    kl_C = (ratio_C - bounded_C - 1) + (ratio_C - 1) * (log_ratio_C - bounded_C)
    derivative_C = 1 - ratio_C if estimator == "k3" else -log_ratio_C
    weight_C = batch.kl_weight_N
    if batch.old_token_logprob_N is not None:
        old_C = batch.old_token_logprob_N.to(logprob_C.dtype)
        weight_C = weighted(weight_C, (logprob_C - old_C).clamp(max=K3_BOUND).exp())
    return Component(weighted(weight_C, kl_C), weighted(weight_C, derivative_C), kl_C=kl_C)


def weighted(weight_C: Tensor, value_C: Tensor) -> Tensor:
    """weight * value, and exactly zero where the weight is, whatever the value."""
    return (weight_C * value_C).masked_fill(weight_C == 0, 0)


def teacher_over_student(
    behaviour_logprob_C: Tensor,
    teacher_logprob_C: Tensor | None,
    given_C: Tensor | None,
    settings: AdvantageConfig,
) -> Tensor:
    """A = log pi_T - log pi_old, or pi_T^alpha - pi_old^alpha with settings.power; then clamped
    where settings.clamp is set.

    Raises:
        ValueError: the micro-batch carries no teacher scores.
    """
    if teacher_logprob_C is None:
        raise ValueError(
            "this objective needs teacher scores: attach them to the micro-batch first"
        )
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
    """The advantage that came with the sample (GRPO: from rewards); clamped where
    settings.clamp is set.

    Raises:
        ValueError: the micro-batch carries no advantages.
    """
    if given_C is None:
        raise ValueError(
            "this objective needs MicroBatch.given_advantage_N: pack with its token_weights"
        )
    if settings.clamp is not None:
        return given_C.clamp(-settings.clamp, settings.clamp)
    return given_C


def given_and_teacher(
    behaviour_logprob_C: Tensor,
    teacher_logprob_C: Tensor | None,
    given_C: Tensor | None,
    settings: AdvantageConfig,
) -> Tensor:
    """The advantage that came with the sample, plus settings.teacher_weight times that of the
    teacher; each is clamped where settings.clamp is set.

    Raises:
        ValueError: the micro-batch carries no advantages, or no teacher scores.
    """
    scores = behaviour_logprob_C, teacher_logprob_C, given_C, settings
    return given_with_sample(*scores) + settings.teacher_weight * teacher_over_student(*scores)


def clipped_surrogate(
    logprob_C: Tensor, old_logprob_C: Tensor | None, advantage_C: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A), its derivative by log pi, and where rho was
    clipped.

    old_logprob_C None: pi_old is the present policy, and rho is exactly 1 (docs/method.md §1).
    """
    if old_logprob_C is None:
        return -advantage_C, -advantage_C, torch.zeros_like(advantage_C, dtype=torch.bool)
    ratio_C = (logprob_C - old_logprob_C).exp()
    bounded_C = ratio_C.clamp(1 - clip, 1 + clip)
    clipped_C = ratio_C * advantage_C > bounded_C * advantage_C
    loss_C = -torch.minimum(ratio_C * advantage_C, bounded_C * advantage_C)
    derivative_C = (-ratio_C * advantage_C).masked_fill(clipped_C, 0)
    return loss_C, derivative_C, clipped_C


@dataclass(frozen=True)
class RowSums:
    """What the passes over the logits give per row, joined over the vocabulary shards."""

    compared: Mapping[str, Statistics]  # the student with each other model, or "" alone
    teacher: Statistics | None  # alone, over tokens, not merged
    at: Mapping[str, Tensor]  # divided logits of each model at looked-up columns, [C, J or K]
    support_ids_CK: Tensor | None
    merged: MergedStops | None  # the stop ids, where they are one outcome in the logits
    divergence_C2: Tensor | None  # of a second pass
    golden_logprob_G: Tensor | None  # of golden rows, where the temperature is not 1


@dataclass(frozen=True)
class RowLosses:
    """The components of the loss of some rows, from their sums; computed where they are read."""

    terms: Terms
    batch: MicroBatch
    columns: TargetColumns
    sums: RowSums

    @property
    def student(self) -> Statistics:
        return next(iter(self.sums.compared.values()))

    def pair(self, other: str) -> PairStatistics | None:
        """The student, compared with another model over the full vocabulary."""
        return cast("PairStatistics | None", self.sums.compared.get(other))

    @cached_property
    def target(self) -> TargetLogprobs:
        return self.columns.logprobs(self.sums.at["student"], self.student.normaliser)

    @cached_property
    def reference_logprob_C(self) -> Tensor | None:
        """Of the target token: given, or from the logits."""
        pair = self.pair("reference")
        if pair is None:
            return (self.batch.reference or NO_SCORES).logprob_N
        return pair.other.log_softmax(self.sums.at["reference"][:, :1])[:, 0]

    @cached_property
    def teacher_logprob_C(self) -> Tensor | None:
        """Of the target or its stop class: given, or from the logits."""
        if self.sums.teacher is None:
            return (self.batch.teacher or NO_SCORES).logprob_N
        return self.columns.logprobs(
            self.sums.at["teacher"], self.sums.teacher.normaliser
        ).logprob_C

    @cached_property
    def support(self) -> SupportDivergence | None:
        given = (self.batch.teacher or NO_SCORES).topk_logprobs_NK
        sums, scale = self.sums, 1.0 / self.terms.temperature
        return support_divergence(sums.support_ids_CK, sums.at, sums.merged, given, scale)

    def advantage(self) -> Tensor:
        """A of every token by itself, under pi_old, or under the present policy without one."""
        behaviour_C = old_logprob(self.batch, self.target)
        if behaviour_C is None:
            behaviour_C = self.target.logprob_C
        return token_advantage(self.terms, self.batch, behaviour_C, self.teacher_logprob_C)

    @cached_property
    def policy(self) -> Component | None:
        """The policy term; None where the loss has none."""
        terms, batch, pair = self.terms, self.batch, self.pair("teacher")
        if terms.advantage is not None:
            advantage_C = batch.given_advantage_N if terms.discount > 0 else self.advantage()
            assert advantage_C is not None
            if terms.settings.control_variate:
                assert pair is not None
                # After the return-to-go, for it belongs to this prefix alone.
                advantage_C = advantage_C + pair.reverse_kl_C
            return surrogate(batch, self.target, advantage_C, terms.clip)
        if terms.divergence is None:
            return None
        if self.support is not None:
            value_C = self.support.value_C
        else:
            assert pair is not None
            value_C = pair.divergence(terms.divergence, self.sums.divergence_C2, terms.jsd_beta)
        return Component(weighted(batch.pg_weight_N, value_C), torch.zeros_like(value_C))

    @cached_property
    def kl(self) -> Component | None:
        """The KL to the reference; None without one."""
        if self.terms.reference == "none":
            return None
        pair, weight_C = self.pair("reference"), self.batch.kl_weight_N
        if pair is not None:
            kl_C = pair.reverse_kl_C
            return Component(weighted(weight_C, kl_C), torch.zeros_like(kl_C), kl_C=kl_C)
        assert self.reference_logprob_C is not None
        token_logprob_C = self.target.token_logprob_C
        return sampled_kl(
            self.terms.reference, self.batch, token_logprob_C, self.reference_logprob_C
        )

    def results(self, golden_rows: Tensor | None) -> LossOutput:
        """Results per row, not summed. golden_rows: where golden_logprob_G belongs."""
        policy, kl, target, batch = self.policy, self.kl, self.target, self.batch
        zero_C, sums = torch.zeros_like(target.logprob_C), self.sums

        def given(value_C: Tensor | None) -> Tensor:
            return zero_C if value_C is None else value_C

        token_logprob_C = target.token_logprob_C
        if golden_rows is not None and sums.golden_logprob_G is not None:
            token_logprob_C = token_logprob_C.index_copy(0, golden_rows, sums.golden_logprob_G)
        sft_C = weighted(batch.sft_weight_N, -token_logprob_C)
        entropy_C = self.student.entropy_C
        if sums.merged is not None:
            entropy_C = sums.merged.token_entropy(self.student, self.terms.temperature)
        kl_teacher_C, pair = None, self.pair("teacher")
        if pair is not None:
            kl_teacher_C = pair.reverse_kl_C
        elif self.teacher_logprob_C is not None:
            kl_teacher_C = target.logprob_C - self.teacher_logprob_C
        pg_C, kl_C = given(policy and policy.value_C), given(kl and kl.value_C)
        return LossOutput(
            loss=pg_C + kl_C + sft_C,
            pg=pg_C,
            kl=kl_C,
            sft=sft_C,
            student_logprob_N=target.logprob_C,
            token_logprob_N=token_logprob_C,
            entropy_N=entropy_C,
            advantage_N=given(policy and policy.advantage_C),
            ratio_clipped_N=given(policy and policy.clipped_C).bool(),
            kl_reference_N=given(kl and kl.kl_C),
            kl_teacher_N=given(kl_teacher_C),
            reference_logprob_N=given(self.reference_logprob_C),
            teacher_logprob_N=given(self.teacher_logprob_C),
            teacher_entropy_N=given(sums.teacher and sums.teacher.entropy_C),
        )
