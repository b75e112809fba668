"""Settings of the turns that somebody else plays before the student's first one. Loads without
torch."""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from stable_opd_mcore.config.section import Section


class PrefixConfig(Section):
    """Turns that begin a rollout before the student's first one: docs/prefixes.md. All rollouts of
    a prompt begin with the same ones, which have no loss."""

    by: Literal["golden", "teacher"] | None = None
    """`golden`: the first of the row's golden turns. `teacher`: turns that a served teacher samples
    in the environment. `null`: the student begins every rollout."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the prompts that begin so; which ones is random."""
    first: NonNegativeInt = 0
    """Fewest such turns. Their number is random from here to `last`."""
    last: PositiveInt | None = None
    """Most such turns; `null`, or more than a row has: all but its last golden turn. Required with
    `by: teacher`."""
    decay_steps: PositiveInt | None = None
    """Steps over which both numbers fall linearly to 0; `null`: they stay."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.by is None and self != PrefixConfig.model_construct():
            given = ", ".join(self.model_dump(exclude_defaults=True))
            raise ValueError(
                f"rollout.prefix has {given} without `by`: set by=golden or by=teacher, or drop it"
            )
        if self.by == "teacher" and self.last is None:
            raise ValueError(
                "rollout.prefix.by=teacher without rollout.prefix.last: no row says how many turns "
                "a teacher could play; set last"
            )
        if self.last is not None and self.first > self.last:
            raise ValueError(
                f"rollout.prefix.first={self.first} exceeds rollout.prefix.last={self.last}; lower "
                "it"
            )
        return self

    def range_at(self, step: int, available: int) -> tuple[int, int]:
        """Fewest and most turns in the step that follows `step` finished ones, of `available`."""
        last = available if self.last is None else min(self.last, available)
        kept, whole = 1, 1
        if self.decay_steps is not None:
            kept, whole = max(0, self.decay_steps - step), self.decay_steps
        last = -(-last * kept // whole)
        return min(self.first * kept // whole, last), last


def prefix_refusal(config: Any) -> str | None:
    """Why nobody could play the turns that rollouts are to begin with; None: somebody can.

    Args:
        config: schema.Config, which calls this.
    """
    by, asked = config.rollout.prefix.by, any(each.asks_teacher for each in config.objectives)
    is_served = config.teacher is not None and config.teacher.is_served and asked
    if by == "teacher" and not (is_served and config.has_environment):
        return (
            "rollout.prefix.by=teacher needs an environment and a served teacher that an "
            "objective asks: set environment.function and teacher.engine=sglang, or by=golden"
        )
    if by == "golden" and all(each.columns.golden != "all" for each in config.data.sources):
        return (
            "rollout.prefix.by=golden, but no source has columns.golden=all, so no row has "
            "several golden turns: set it where conversations do, or drop rollout.prefix"
        )
    return None
