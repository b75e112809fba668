"""Every setting of a run, in one frozen, typed tree. Loads without torch.

One owner per value: the temperature is in `sampling`, the reference's weight in `kl.beta`, the stop
ids of a model in its own section. Relations between settings are checked where both are in sight.
Not here: checks that need the world size, a model or data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import Field, PositiveInt, model_validator

from stable_opd_mcore.config.data import DataConfig
from stable_opd_mcore.config.evaluation import EvaluationConfig, MonitoringConfig
from stable_opd_mcore.config.models import (
    ModelConfig,
    ReferenceConfig,
    TeacherConfig,
    TokenizerConfig,
)
from stable_opd_mcore.config.rollouts import RolloutConfig, SamplingConfig
from stable_opd_mcore.config.section import Section
from stable_opd_mcore.config.training import (
    CheckpointConfig,
    ColdStartConfig,
    FaultConfig,
    MemoryConfig,
    Offloadable,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)


class RunConfig(Section):
    """The run's name and place."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory."""
    directory: str = "runs"
    """Directory of all runs."""

    @property
    def path(self) -> Path:
        """The directory of everything that the run writes."""
        return Path(self.directory) / self.name


class AdvantageConfig(Section):
    """Options on the advantage of a sampled token: docs/method.md §3."""

    control_variate: bool = False
    """`opd`: add KL(student || teacher) of the prefix (vOPD)."""
    power: float | None = Field(default=None, gt=0)
    """`opd`: teacher^power - student^power of the probabilities in place of the log-ratio
    (PowerOPD)."""
    clamp: float | None = Field(default=None, gt=0)
    """Clamp the advantage to [-clamp, clamp], before discounting and before the control variate."""


class TokenMasksConfig(Section):
    """Tokens of rollouts that the policy term leaves out; the KL to the reference keeps them."""

    special_token_ids: tuple[int, ...] = ()
    """The first occurrence of each id in a response."""
    truncated_rollouts: bool = False
    """All tokens of rollouts that did not end with a stop token."""
    repetitive_tail: bool = False
    """The maximal periodic suffix of a response."""


class ObjectiveConfig(Section):
    """The policy term of the loss: docs/method.md §1 and §3."""

    name: str = "opd"
    """A name of `OBJECTIVES` in losses/objectives.py: sft, grpo, opd, lsm, student_topk, gkd."""
    clip: float = Field(default=0.2, gt=0)
    """`opd`, `grpo`: the probability ratio is clipped to [1 - clip, 1 + clip]."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """`opd`: discount of the return-to-go; 0: each token has its own advantage only."""
    stop_class: bool = True
    """Compare the probability of stopping instead of the probability of one stop token, where
    student and teacher stop on different ids: docs/method.md §4."""
    top_k: PositiveInt = 32
    """`lsm`, `student_topk`: size of the support."""
    divergence: Literal["forward", "reverse", "jsd"] = "reverse"
    """`gkd`: KL(teacher || student), KL(student || teacher) or the Jensen-Shannon divergence."""
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """`gkd` with `divergence: jsd`: the teacher's share of the mixture."""
    on_policy_fraction: float = Field(default=1.0, ge=0, le=1)
    """`gkd`: share of prompts trained on rollouts; the others are trained on golden solutions."""
    std_normalise: bool = True
    """`grpo`: divide by the standard deviation of the group's rewards. `false` with
    `aggregation: constant` is Dr.GRPO."""
    advantage: AdvantageConfig = AdvantageConfig()
    masks: TokenMasksConfig = TokenMasksConfig()


class KLConfig(Section):
    """The KL to the frozen reference: docs/method.md §2."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the mean KL(student || reference) over the prefixes of the rollouts."""
    estimator: Literal["exact", "k3", "k3+"] = "exact"
    """`exact`: over the full vocabulary. `k3`: r - log r - 1 with r = reference / student of the
    sampled token; its expected gradient is that of KL(reference || student), the other direction.
    `k3+`: the value of k3 with a gradient whose expectation is that of KL(student || reference)."""


class MixtureConfig(Section):
    """The golden solutions beside the rollouts: docs/method.md §2."""

    lambda_: float = Field(default=0.0, ge=0, alias="lambda")
    """Weight of the mean negative log-likelihood of one golden solution per prompt."""


class Config(Section):
    """A run."""

    run: RunConfig
    student: ModelConfig
    """The model that is trained."""
    teacher: TeacherConfig | None = None
    """The model that scores the student's tokens; `null`: none."""
    reference: ReferenceConfig = ReferenceConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Normaliser of the policy term. `sequence_mean`: mean over responses of the mean over their
    tokens. `token_mean`: mean over all tokens. `constant`: sum over tokens divided by the number of
    responses times `sampling.max_new_tokens`."""
    kl: KLConfig = KLConfig()
    mixture: MixtureConfig = MixtureConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    memory: MemoryConfig = MemoryConfig()
    cold_start: ColdStartConfig | None = None
    """Supervised steps first; `null`: none."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault: FaultConfig = FaultConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    @property
    def is_colocated(self) -> bool:
        """Whether SGLang servers share the trainer's GPUs."""
        return self.rollout.engine == "sglang" and self.rollout.sglang.placement == "colocated"

    @property
    def offloaded(self) -> tuple[Offloadable, ...]:
        """`memory.offload`, or what is derived where it is null."""
        if self.memory.offload is not None:
            return self.memory.offload
        return get_args(Offloadable) if self.is_colocated else ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.student.path is None and self.student.architecture is None:
            raise ValueError(
                "student needs path (a Hugging Face directory) or architecture (random weights)"
            )
        if self.tokenizer.path is None and self.student.path is None:
            raise ValueError(
                "tokenizer.path is needed when the student has no path to take it from"
            )
        if self.teacher and self.teacher.engine == "sglang" and self.sampling.temperature != 1:
            raise ValueError(
                f"sampling.temperature={self.sampling.temperature} with teacher.engine=sglang: a "
                "server scores prompts at temperature 1 alone, so its log-probabilities would not "
                "compare with the student's; set sampling.temperature=1 or teacher.engine=megatron"
            )
        if self.teacher and self.teacher.engine == "sglang" and self.parallel.context > 1:
            raise ValueError(
                f"parallel.context={self.parallel.context} with teacher.engine=sglang: a server "
                "scores whole sequences, and each rank holds a slice; set parallel.context=1 or "
                "teacher.engine=megatron"
            )
        if "student" in (self.memory.offload or ()) and not self.is_colocated:
            raise ValueError(
                "memory.offload names `student`, whose weights only colocated servers do not need: "
                f"rollout.engine={self.rollout.engine}, rollout.sglang.placement="
                f"{self.rollout.sglang.placement}; leave it out, or colocate SGLang servers"
            )
        self._require_waits_below_watchdog()
        if self.mixture.lambda_ and self.data.train.columns.solution is None:
            raise ValueError(
                "mixture.lambda > 0 needs golden solutions: set data.train.columns.solution"
            )
        return self

    def _require_waits_below_watchdog(self) -> None:
        """A wait that ends by itself must end before the watchdog takes it for a hang."""
        limit, sglang = self.fault.watchdog_minutes, self.rollout.sglang
        waits: dict[str, float] = {}
        if self.rollout.engine == "sglang":
            waits = {
                "rollout.sglang.request_timeout_seconds": sglang.request_timeout_seconds,
                "rollout.sglang.startup_timeout_seconds": sglang.startup_timeout_seconds,
                "rollout.sglang.sync_timeout_seconds": sglang.sync_timeout_seconds,
            }
        if self.teacher and self.teacher.engine == "sglang":
            waits["teacher.request_timeout_seconds"] = self.teacher.request_timeout_seconds
        for key, seconds in waits.items():
            if limit is not None and seconds >= 60 * limit:
                raise ValueError(
                    f"{key}={seconds:g} is not below fault.watchdog_minutes={limit:g} "
                    f"({60 * limit:g} s): the watchdog would end a run that only waits; lower the "
                    "first or raise the second"
                )
