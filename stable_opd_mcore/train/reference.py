"""The reference that follows the student: `reference.update`.

The KL then keeps the student close to its own past (docs/method.md §2). The weights are part of the
run's checkpoints. Not here: scoring with the reference (scoring/megatron.py), beta (strengths.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stable_opd_mcore.config.models import ReferenceConfig
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.weights import copy_weights
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.train import phases


@dataclass(frozen=True)
class MovingReference:
    """The reference's weights on this rank, which change between steps.

    Under `ema` with bf16 weights, `kept` is an fp32 model, because an average in bf16 stands still
    as soon as a step's change is below its precision. Where `chunks` may hold weights in FP8,
    `kept` has them as they were. Else it is `chunks`.
    """

    config: ReferenceConfig
    student: Sequence[HiddenStatesGPTModel]
    chunks: Sequence[HiddenStatesGPTModel]  # score the rollouts
    kept: Sequence[HiddenStatesGPTModel]  # saved in checkpoints

    def follow(self, step: int, memory: DeviceMemory) -> None:
        """Take the student's weights after `step`, if they are due."""
        if self.config.update == "every" and step % self.config.every:
            return
        memory.bring(*phases.FROZEN)
        decay = self.config.decay if self.config.update == "ema" else 0.0
        copy_weights(self.student, self.kept, decay)
        self.restore()

    def restore(self) -> None:
        """Score with the kept weights from now on."""
        if self.kept is not self.chunks:
            copy_weights(self.kept, self.chunks)
