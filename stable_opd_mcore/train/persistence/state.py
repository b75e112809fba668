"""What a run remembers beside weights and optimizer: its counters and its guard's memory.

They determine every later step: rollout noise and data order are pure functions of the seed and
these counters, so a restored run continues exactly as the uninterrupted one would have. Not here:
anything derived from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import ConfigDict

from stable_opd_mcore.train.oversight.guard import GuardState
from stable_opd_mcore.train.strengths import Adapted


@dataclass(frozen=True)
class TrainState:
    __pydantic_config__ = ConfigDict(extra="forbid")  # for the reader of checkpoints

    step: int = 0  # completed training steps
    cursor: int = 0  # prompts consumed so far, over all epochs
    optimizer_steps: int = 0  # completed; several per training step with train.minibatches > 1
    weight_version: int = 0  # of the student's weights; every rollout records it
    adapted: Adapted = field(default_factory=Adapted)
    guard: GuardState = field(default_factory=GuardState)
    # With rollout.order=completed, by their places in the data order, rising and equally many:
    late: tuple[int, ...] = ()  # prompts before the cursor on which the next step trains
    early: tuple[int, ...] = ()  # prompts from the cursor on that were trained on already

    def advance(self, draws: Sequence[int], optimizer_steps: int) -> TrainState:
        """The state after one training step.

        Args:
            draws: the places of the step's prompts in the data order.
        """
        cursor, trained = self.cursor + len(draws), {*self.early, *draws}
        behind = {*self.late, *range(self.cursor, cursor)}
        return replace(
            self,
            step=self.step + 1,
            cursor=cursor,
            late=tuple(sorted(behind - trained)),
            early=tuple(sorted(draw for draw in trained if draw >= cursor)),
            optimizer_steps=self.optimizer_steps + optimizer_steps,
            weight_version=self.weight_version + 1,
        )
