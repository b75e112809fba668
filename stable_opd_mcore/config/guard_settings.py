"""Settings of the collapse guard. Loads without torch."""

from typing import Literal

from pydantic import Field, field_validator

from stable_opd_mcore.config.section import Section

HEALTHY_AFTER = 10  # steps without a symptom after a checkpoint, until the guard may return to it
MAX_ROLLBACKS = 2  # each returns to another healthy checkpoint
# Checkpoints that the guard keeps: those to return to, and a newer one that may become healthy
MOST_KEPT = MAX_ROLLBACKS + 1
MOST_STEPS_BETWEEN_SAVES = 20  # with more, an early collapse may find no checkpoint to return to


class GuardConfig(Section):
    """The collapse guard: docs/guard.md."""

    policy: Literal["off", "warn", "act"] = "warn"
    """`warn`: symptoms of a collapse are logged and written to metrics.jsonl as events. `act`: the
    guard also raises beta and lambda, returns to a healthy checkpoint and, if nothing helps, stops
    the run; it needs `checkpoint.every`."""
    max_beta: float = Field(default=1.0, ge=0)
    """`act`: the largest `kl.beta` that the guard sets. Above 0 the reference is loaded from the
    start of the run, even if `kl.beta` is 0. 0: beta is not raised."""
    max_lambda: float = Field(default=1.0, ge=0)
    """`act`: the largest `mixture.lambda` that the guard sets. Above 0 the data needs golden
    solutions. 0: lambda is not raised."""

    @field_validator("policy", mode="before")
    @classmethod
    def _bare_off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @property
    def acts(self) -> bool:
        """Whether the guard may change the training."""
        return self.policy == "act"
