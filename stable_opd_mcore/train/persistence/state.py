"""What a run remembers next to weights and optimizer: its counters and its guard's memory.

They determine every later step: rollout noise and data order are pure functions of the seed and
these counters, so a restored run continues exactly as the uninterrupted one would have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pydantic import ConfigDict

from stable_opd_mcore.train.loss_weights import Adapted
from stable_opd_mcore.train.oversight.guard import GuardState


@dataclass(frozen=True)
class TrainState:
    __pydantic_config__ = ConfigDict(extra="forbid")  # checkpoints are read with it

    step: int = 0  # completed training steps
    cursor: int = 0  # prompts consumed so far, over all epochs
    optimizer_steps: int = 0  # completed; several per training step with train.minibatches > 1
    weight_version: int = 0  # the student's; every rollout records it
    adapted: Adapted = field(default_factory=Adapted)
    guard: GuardState = field(default_factory=GuardState)

    def advance(self, prompts: int, optimizer_steps: int) -> TrainState:
        return replace(
            self,
            step=self.step + 1,
            cursor=self.cursor + prompts,
            optimizer_steps=self.optimizer_steps + optimizer_steps,
            weight_version=self.weight_version + 1,
        )
