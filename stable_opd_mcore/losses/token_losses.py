"""The loss of single tokens: plain functions of a few numbers per row (docs/method.md §1-3).

Logits enter the loss through the fields of `Rows` that are differentiable. An objective (`opd`,
`grpo`, `grpo_opd`, `divergence_from_teacher`) is a differentiable function from Rows and its
settings to a `PolicyLoss`. `token_losses` adds the KL to the reference and the likelihood of golden
tokens, with their weights. The fused path (fused.py) and the definition on whole distributions
(tests/losses/definitions.py) fill Rows in two ways and call these functions; autograd
differentiates them.

All tensors are [C], one number per row, or [C, K], one per row and id: fp32, fp64 for fp64
logits; log-probabilities in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stable_opd_mcore.config.objective_settings import AdvantageConfig, ObjectiveConfig
from stable_opd_mcore.losses.torch_ops import DenseDivergence
from stable_opd_mcore.records import LossOutput, MicroBatch, Scores

DEFAULTS = ObjectiveConfig.model_validate({})
NO_SCORES = Scores(None)
Divergence = DenseDivergence | Literal["teacher_support", "student_support"]
K3_BOUND = 10.0  # log ratio up to which k3 is exponential, and at which its weight is cut
RATIO_BOUND = 20.0  # log ratio beyond every clip bound, whose exponential is finite


@dataclass(frozen=True)
class Rows:
    """What the loss reads of C tokens. Differentiable: the first three fields, and any field marked
    so.
    """

    logprob: Tensor  # log pi of the target, or of stopping where the target is a stop id
    token_logprob: Tensor  # log pi of the target itself
    likelihood: Tensor  # token_logprob, of golden tokens at temperature 1
    # Constants from here on, unless marked.
    old_logprob: Tensor  # logprob of the policy that sampled; logprob itself on policy
    trained: Tensor  # bool, the policy term has a weight
    divergence: Tensor | None = None  # differentiable: Terms.divergence of student and teacher
    kl_reference: Tensor | None = None  # differentiable: exact KL(student || reference)
    # [C, K], of the teacher's most probable ids, where Terms.divergence is "teacher_support"
    support: Tensor | None = None  # differentiable: log pi
    teacher_support: Tensor | None = None  # log pi_T
    old_token_logprob: Tensor | None = None  # token_logprob of the same policy; None on policy
    teacher_logprob: Tensor | None = None  # the teacher's logprob
    reference_logprob: Tensor | None = None  # the reference's token_logprob
    kl_teacher: Tensor | None = None  # exact KL(student || teacher)
    given_advantage: Tensor | None = None  # came with the sample (GRPO: from rewards)
    returns: Tensor | None = None  # discounted sum of Terms.discounted over the later tokens
    entropy: Tensor | None = None  # the student's, over tokens
    teacher_entropy: Tensor | None = None

    @classmethod
    def of(cls, batch: MicroBatch, logprob: Tensor, token_logprob: Tensor) -> Rows:
        """Rows with the constants that the micro-batch gives, of tokens that are not golden.

        Where rollouts are stale, only the token's old probability is known, not that of its stop
        class. The class then gets old_token + (class - token) of the present policy. So the ratio
        of the class equals that of the token: 1 on policy, and exact on average over pi_old.
        """
        old = batch.old_logprob_N
        if old is None:
            old = logprob.detach()
            if batch.old_token_logprob_N is not None:
                old = batch.old_token_logprob_N + (old - token_logprob.detach())
        return cls(
            logprob=logprob,
            token_logprob=token_logprob,
            likelihood=token_logprob,
            old_logprob=old,
            trained=batch.pg_weight_N != 0,
            old_token_logprob=batch.old_token_logprob_N,
            given_advantage=batch.given_advantage_N,
        )


class PolicyLoss(NamedTuple):
    """The policy term of C tokens, before weights, and what metrics report of it."""

    loss: Tensor  # differentiable
    advantage: Tensor | None = None
    is_clipped: Tensor | None = None


@dataclass(frozen=True)
class Terms:
    """What a loss is made of."""

    policy: Callable[[Rows, ObjectiveConfig], PolicyLoss] | None = None
    # Rows.returns are made of these advantages where settings.discount > 0
    discounted: Callable[[Rows, AdvantageConfig], Tensor] | None = None
    divergence: Divergence | None = None  # Rows.divergence, at every visited prefix
    settings: ObjectiveConfig = DEFAULTS
    reference: Literal["none", "exact", "k3", "k3+"] = "none"
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()  # one outcome in the comparison with the teacher

    @property
    def on_support(self) -> bool:
        """Whether the divergence is over K ids of each row, not over the vocabulary."""
        return self.divergence in ("teacher_support", "student_support")

    @property
    def dense_divergence(self) -> DenseDivergence | None:
        """The divergence, where it is over the vocabulary."""
        if self.divergence == "teacher_support" or self.divergence == "student_support":
            return None
        return self.divergence

    @property
    def compares_teacher(self) -> bool:
        """Whether student and teacher are compared over the full vocabulary."""
        return self.dense_divergence is not None or self.settings.advantage.control_variate

    @property
    def teacher_logits(self) -> bool:
        """Whether the teacher's logits are made here, from its hidden states and head."""
        return self.compares_teacher or self.divergence == "student_support"

    @property
    def merged_ids(self) -> tuple[int, ...]:
        """Stop ids that are one outcome in every distribution of the loss; empty for none.

        Where only sampled tokens are compared with the teacher nothing is merged: the reference
        stops as the student does, and the KL to it then keeps the student's own stop token too.
        """
        compares = self.divergence is not None or self.settings.advantage.control_variate
        return self.stop_ids if compares else ()


# ---- objectives


def opd(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
    """The clipped surrogate of the teacher's advantage (docs/method.md §1, options §3)."""
    advantage = rows.returns
    if advantage is None:
        advantage = from_teacher(rows, settings.advantage)
    if settings.advantage.control_variate:
        assert rows.kl_teacher is not None
        # Added after the return-to-go, because it belongs to this prefix only.
        advantage = advantage + rows.kl_teacher
    return clipped_surrogate(rows, advantage, settings.clip)


def grpo(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
    """The clipped surrogate of the group-normalised reward (docs/method.md §3)."""
    return clipped_surrogate(rows, from_reward(rows, settings.advantage), settings.clip)


def grpo_opd(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
    """The clipped surrogate of both advantages, the teacher's times teacher_weight."""
    teacher = settings.advantage.teacher_weight * from_teacher(rows, settings.advantage)
    advantage = from_reward(rows, settings.advantage) + teacher
    return clipped_surrogate(rows, advantage, settings.clip)


def divergence_from_teacher(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
    """`gkd`, `lsm` and `student_topk`, which differ in Terms.divergence (docs/method.md §3)."""
    assert rows.divergence is not None
    return PolicyLoss(rows.divergence)


# ---- advantages: constants


def from_teacher(rows: Rows, settings: AdvantageConfig) -> Tensor:
    """A = log pi_T - log pi, or pi_T^alpha - pi^alpha with settings.power; compressed and clamped.
    pi is pi_old, or the present student by settings.policy.

    Raises:
        ValueError: the micro-batch carries no teacher scores.
    """
    if rows.teacher_logprob is None:
        raise ValueError(
            "this objective needs teacher scores: attach them to the micro-batch first"
        )
    teacher, alpha = rows.teacher_logprob, settings.power
    own = rows.logprob.detach() if settings.policy == "present" else rows.old_logprob
    advantage = teacher - own
    if alpha is not None:
        # The old probability of a stop class is derived (`Rows.of`), and can exceed 1.
        teacher, own = teacher.clamp(max=0), own.clamp(max=0)
        advantage = (alpha * teacher).exp() - (alpha * own).exp()
    if settings.log:
        advantage = advantage.sign() * advantage.abs().log1p()
    return _clamped(advantage, settings)


def from_reward(rows: Rows, settings: AdvantageConfig) -> Tensor:
    """The advantage that came with the sample, clamped; ValueError without one."""
    if rows.given_advantage is None:
        raise ValueError(
            "this objective needs MicroBatch.given_advantage_N: pack with its token_weights"
        )
    return _clamped(rows.given_advantage, settings)


def _clamped(advantage: Tensor, settings: AdvantageConfig) -> Tensor:
    """The advantage within [-settings.clamp, settings.clamp], where a clamp is set."""
    return advantage if settings.clamp is None else advantage.clamp(-settings.clamp, settings.clamp)


# ---- parts of the loss


def clipped_surrogate(rows: Rows, advantage: Tensor, clip: float) -> PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A) with rho = pi / pi_old (docs/method.md §1).

    The only exponential that may overflow is that of a ratio with A < 0: the loss grows with it.
    """
    advantage = advantage.detach().masked_fill(~rows.trained, 0)
    log_ratio = (rows.logprob - rows.old_logprob).masked_fill(advantage == 0, 0)
    log_ratio = torch.where(advantage > 0, log_ratio.clamp(max=RATIO_BOUND), log_ratio)
    ratio = log_ratio.exp()
    plain, bounded = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    return PolicyLoss(-torch.minimum(plain, bounded), advantage, plain > bounded)


def k3(rows: Rows, keeps_direction: bool) -> tuple[Tensor, Tensor]:
    """An estimate of the KL to the reference from the sampled token, and the weight of the estimate
    (docs/method.md §2).

    r - log r - 1 with r = pi_ref / pi, linear beyond K3_BOUND. keeps_direction ("k3+"): with the
    gradient of (log r)^2 / 2. The weight is pi / pi_old, bounded by e^K3_BOUND; 1 on policy.
    """
    assert rows.reference_logprob is not None
    log_ratio = rows.reference_logprob - rows.token_logprob
    bounded = log_ratio.clamp(max=K3_BOUND)
    ratio = bounded.exp()
    value = (ratio - bounded - 1) + (ratio - 1) * (log_ratio - bounded)
    if keeps_direction:
        k2 = log_ratio.square() / 2
        value = value.detach() + (k2 - k2.detach())
    if rows.old_token_logprob is None:
        return value, torch.ones_like(value)
    log_weight = rows.token_logprob.detach() - rows.old_token_logprob
    return value, log_weight.clamp(max=K3_BOUND).exp()


def weighted(weight: Tensor, value: Tensor) -> Tensor:
    """weight * value, and exactly zero where the weight is, even if the value is not finite."""
    return weight * value.masked_fill(weight == 0, 0)


def token_losses(terms: Terms, rows: Rows, batch: MicroBatch) -> LossOutput:
    """The loss of C tokens, not summed, and what metrics read of them (docs/method.md §2)."""
    zero = torch.zeros_like(rows.logprob)
    policy = PolicyLoss(zero)
    if terms.policy is not None:
        policy = terms.policy(rows, terms.settings)
    kl_reference, kl_weight = rows.kl_reference, batch.kl_weight_N
    if kl_reference is None and terms.reference != "none":
        kl_reference, stale = k3(rows, keeps_direction=terms.reference == "k3+")
        kl_weight = kl_weight * stale
    kl_teacher = rows.kl_teacher
    if kl_teacher is None and rows.teacher_logprob is not None:
        kl_teacher = rows.logprob - rows.teacher_logprob

    def given(value: Tensor | None) -> Tensor:
        return zero if value is None else value

    pg = weighted(batch.pg_weight_N, policy.loss)
    kl = zero if kl_reference is None else weighted(kl_weight, kl_reference)
    sft = weighted(batch.sft_weight_N, -rows.likelihood)
    return LossOutput(
        loss=pg + kl + sft,
        pg=pg,
        kl=kl,
        sft=sft,
        student_logprob_N=rows.logprob,
        token_logprob_N=rows.likelihood,
        entropy_N=given(rows.entropy),
        advantage_N=policy.advantage,
        ratio_clipped_N=policy.is_clipped,
        kl_reference_N=given(kl_reference),
        kl_teacher_N=given(kl_teacher),
        reference_logprob_N=given(rows.reference_logprob),
        teacher_logprob_N=given(rows.teacher_logprob),
        teacher_entropy_N=given(rows.teacher_entropy),
    )
