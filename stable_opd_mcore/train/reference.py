"""A reference or self-teacher that follows the student: `reference.update`, `teacher.weights: ema`.

The KL then keeps the student close to its own past (docs/method.md §2), or the student learns from
its own average (§1). The weights are part of the run's checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stable_opd_mcore.config.models import ReferenceConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.files.megatron_checkpoint import (
    is_megatron,
    load_weights,
    set_weights,
    weights_of,
)
from stable_opd_mcore.models.gpt import Precision, build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.lora import factors_as, set_factors, sharded_factors, values_of
from stable_opd_mcore.models.weights import architecture_of, copy_weights, refuse_non_finite
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.train import phases


@dataclass(frozen=True)
class MovingWeights:
    """The weights of one such model on this rank, which change between steps.

    Under `ema` with bf16 weights, `kept` is an fp32 model, because an average in bf16 stops moving
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

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return weights_of(self.kept)

    def load(self, loaded: dict[str, Any], origin: str) -> None:
        """Take what was loaded for `saved`; a UserError names `origin` if it is not finite."""
        set_weights(self.kept, loaded)
        refuse_non_finite(self.kept, origin)
        self.restore()

    def restore(self) -> None:
        """Score with the kept weights from now on."""
        if self.kept is not self.chunks:
            copy_weights(self.kept, self.chunks)


@dataclass(frozen=True)
class MovingFactors:
    """A reference that is the student with the low-rank factors of an earlier step."""

    every: int
    student: Sequence[HiddenStatesGPTModel]
    values: Sequence[Tensor]  # of this rank's factors

    def follow(self, step: int, _memory: DeviceMemory) -> None:
        """As in `MovingWeights`, like the other methods."""
        if step % self.every == 0:
            for value, own in zip(self.values, values_of(self.student), strict=True):
                value.copy_(own)

    def saved(self) -> dict[str, Any]:
        return sharded_factors(self.student, self.values)

    def load(self, loaded: dict[str, Any], origin: str) -> None:
        with factors_as(self.student, self.values):
            set_factors(self.student, loaded)
            refuse_non_finite(self.student, origin)


Moving = MovingWeights | MovingFactors


def frozen_student(
    config: Config,
    world: World,
    student: Sequence[HiddenStatesGPTModel],
    settings: ReferenceConfig,
    fp8: Fp8 | None,
) -> tuple[list[HiddenStatesGPTModel], MovingWeights | None]:
    """Frozen chunks of the student's architecture with the weights of `settings.path`, or with the
    student's present ones; and how they follow the student, None where they never do.

    Raises:
        UserError: weights that `load_hf` or `load_weights` refuse.
    """

    def built(precision: Precision, fp8: Fp8 | None) -> list[HiddenStatesGPTModel]:
        like = architecture_of(student)
        chunks = build_model(like, world, precision=precision, fp8=fp8, trainable=False, seed=None)
        if settings.path is None:
            copy_weights(student, chunks)
        else:
            read_weights(chunks, settings.path)
        return chunks

    precision = config.train.precision
    chunks = built(precision, fp8)
    if settings.update == "never":
        return chunks, None
    averages = settings.update == "ema" and precision == "bf16"
    # `chunks` may hold the weights rounded to FP8.
    kept = built("fp32" if averages else precision, None) if averages or fp8 else chunks
    return chunks, MovingWeights(settings, student, chunks, kept)


def read_weights(chunks: Sequence[HiddenStatesGPTModel], path: str) -> None:
    """Read weights from a Hugging Face directory or a Megatron checkpoint."""
    if is_megatron(path):
        load_weights(chunks, path)
    else:
        load_hf(chunks, path)
