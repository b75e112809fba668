"""The counters of a run that, with weights and optimizer state, determine every later step.

Rollout noise and data order are pure functions of the seed and these counters, so a restored run
continues exactly as the uninterrupted one would have. Not here: anything derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TrainState:
    step: int = 0  # completed training steps
    cursor: int = 0  # prompts consumed so far, over all epochs
    optimizer_steps: int = 0  # completed; several per training step with train.minibatches > 1
    weight_version: int = 0  # of the student's weights; every rollout records it

    def advance(self, num_prompts: int, optimizer_steps: int) -> TrainState:
        """The state after one training step on `num_prompts` prompts."""
        return replace(
            self,
            step=self.step + 1,
            cursor=self.cursor + num_prompts,
            optimizer_steps=self.optimizer_steps + optimizer_steps,
            weight_version=self.weight_version + 1,
        )
