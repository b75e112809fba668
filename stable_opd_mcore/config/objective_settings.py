"""Settings of the loss: the policy term, its advantages and token masks, and the two terms that may
be added to it, the KL to the reference and the golden solutions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from stable_opd_mcore.config.section import Section
from stable_opd_mcore.host.user_code import UserFunction, is_user_function, read_user_function

_Cut = Literal["length", "turns", "window"]  # values of `Ending`
# What the `rows` of a user's objective hold on request: docs/own_code.md
OWN_NEEDS = ("teacher_logprob", "support", "divergence", "given_advantage")


class AdvantageConfig(Section):
    """Options on the advantage of a sampled token: docs/method.md §3."""

    policy: Literal["present", "rollout"] | None = None
    """The student in the teacher's log-ratio. `present`: the one of this update, which stale
    rollouts need for the gradient of the KL to the teacher. `rollout`: the one of the ratio's
    denominator. `null`: `present` with `rollout.max_staleness`, `rollout` otherwise."""
    control_variate: bool = False
    """`opd`: add KL(student || teacher) of the prefix (vOPD)."""
    power: float | None = Field(default=None, gt=0)
    """`opd`: teacher^power - student^power of the probabilities in place of the log-ratio
    (PowerOPD)."""
    log: bool = False
    """`opd`: sign(A) log(1 + |A|) in place of A, before clamping."""
    clamp: float | None = Field(default=None, gt=0)
    """Clamp the advantage to [-clamp, clamp], before discounting and before the control variate."""
    teacher_weight: float = Field(default=1.0, gt=0)
    """`grpo_opd`: weight of the teacher's log-ratio next to the advantage from rewards."""

    def resolved(self, is_stale: bool) -> AdvantageConfig:
        """A copy with the policy that `null` stands for."""
        default = "present" if is_stale else "rollout"
        return self.model_copy(update={"policy": self.policy or default})


def _cut(value: object) -> object:
    """`true` and `false` as the endings that they mean."""
    return ((), ("length",))[value] if isinstance(value, bool) else value


class TokenMasksConfig(Section):
    """Tokens of rollouts that the policy term leaves out; the KL to the reference keeps them."""

    special_token_ids: tuple[int, ...] = ()
    """The first occurrence of each id in a response."""
    truncated_rollouts: Annotated[tuple[_Cut, ...], BeforeValidator(_cut)] = ()
    """All tokens of what a limit cut: of a response, or a turn of an episode, that reached its most
    tokens (`length`); of an episode that had `environment.max_turns` (`turns`), or whose next turn
    has no room (`window`). `true`: `[length]`."""
    repetitive_tail: bool = False
    """The maximal periodic suffix of a response."""
    after_tokens: PositiveInt | None = None
    """All tokens of a response after this many; `null`: none."""


class ObjectiveConfig(Section):
    """The policy term of the loss: docs/method.md §1 and §3."""

    name: str = "opd"
    """An objective of docs/objectives.md, or a function of your own, `path/to/file.py:function`:
    docs/own_code.md."""
    clip: float = Field(default=0.2, gt=0)
    """`opd`, `grpo`, `grpo_opd`: the probability ratio is clipped to [1 - clip, 1 + clip]."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """`opd`: discount of the return-to-go; 0: each token has its own advantage only."""
    stop_class: bool = True
    """Compare the probability of stopping instead of the probability of one stop token, where
    student and teacher stop on different ids: docs/method.md §4."""
    top_k: PositiveInt = 32
    """`lsm`, `student_topk`: size of the support."""
    tail: bool = False
    """`lsm`, `student_topk`: all tokens outside the support are one more outcome; `false`: both
    models are renormalised on the support."""
    divergence: Literal["forward", "reverse", "jsd"] = "reverse"
    """`gkd`: KL(teacher || student), KL(student || teacher) or the Jensen-Shannon divergence."""
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """`gkd` with `divergence: jsd`: the teacher's share of the mixture."""
    on_policy_fraction: float = Field(default=1.0, ge=0, le=1)
    """`gkd`: share of prompts trained on rollouts; the others are trained on golden solutions, each
    with the weight of all rollouts of a prompt."""
    std_normalise: bool = True
    """`grpo` and `grpo_opd` divide advantages by the standard deviation of the group's rewards.
    Dr.GRPO is `false` with `aggregation: constant`."""
    advantage: AdvantageConfig = AdvantageConfig()
    masks: TokenMasksConfig = TokenMasksConfig()

    @model_validator(mode="after")
    def _own_function(self) -> Self:
        if not self.needs <= set(OWN_NEEDS) or self.needs >= {"support", "divergence"}:
            raise ValueError(
                f"{self.name}: NEEDS is {', '.join(sorted(self.needs))}; set it to a tuple of some "
                f"of {', '.join(OWN_NEEDS)}, and of support and divergence at most one"
            )
        return self

    @property
    def asks_teacher(self) -> bool:
        """Whether the loss reads scores of a teacher."""
        if is_user_function(self.name):
            return bool(self.needs - {"given_advantage"})
        return self.name not in ("sft", "grpo")

    def read(self) -> UserFunction:
        """The function of the user's own."""
        return read_user_function(self.name, ("rows", "settings"))

    @property
    def needs(self) -> frozenset[str]:
        """The scores that a function of the user's own asks for: NEEDS of its file."""
        if not is_user_function(self.name):
            return frozenset()
        found: Any = vars(self.read().module()).get("NEEDS", ())
        names = cast("list[Any]", found) if isinstance(found, tuple | list) else [found]
        return frozenset(map(str, names))


class AdaptiveSection(Section):
    """A weight that may follow a target: docs/method.md §10."""

    target: float | None = Field(default=None, gt=0)
    """Adapt the weight so that its metric stays near this value; `null`: the weight is constant."""


class KLConfig(AdaptiveSection):
    """The KL to the frozen reference: docs/method.md §2. `target` is a value of `kl/reference`."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the mean KL(student || reference) over the prefixes of the rollouts."""
    estimator: Literal["exact", "k3", "k3+"] = "exact"
    """`exact`: over the full vocabulary. `k3`: r - log r - 1 with r = reference / student of the
    sampled token; its expected gradient is that of KL(reference || student), the other direction.
    `k3+`: the value of k3 with a gradient whose expectation is that of KL(student || reference)."""


class MixtureConfig(AdaptiveSection):
    """Golden solutions, which are trained on next to the rollouts: docs/method.md §2. `target` is a
    value of their mean negative log-likelihood per token."""

    lambda_: float = Field(default=0.0, ge=0, alias="lambda")
    """Weight of the mean negative log-likelihood of golden solutions."""
