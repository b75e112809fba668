"""Every setting of a run, in one frozen, typed tree. Loads without torch.

One owner per value: the temperature is in `sampling`, the reference's weight in `kl.beta`, the stop
ids of a model in its own section. What does not go together is refused in relations.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from stable_opd_mcore.config.data import DataConfig, RewardConfig, TrainSource
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.evaluation_settings import EvaluationConfig, MonitoringConfig
from stable_opd_mcore.config.guard_settings import GuardConfig
from stable_opd_mcore.config.models import (
    ModelConfig,
    ReferenceConfig,
    StudentConfig,
    TeacherConfig,
    TokenizerConfig,
)
from stable_opd_mcore.config.objective_settings import KLConfig, MixtureConfig, ObjectiveConfig
from stable_opd_mcore.config.relations import relations_refusal
from stable_opd_mcore.config.rollouts import RolloutConfig, SamplingConfig
from stable_opd_mcore.config.section import Section
from stable_opd_mcore.config.source_objectives import with_whole_objectives
from stable_opd_mcore.config.training import (
    CheckpointConfig,
    ColdStartConfig,
    FaultConfig,
    Fp8Config,
    Fp8Role,
    MemoryConfig,
    Offloadable,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from stable_opd_mcore.host.run_directory import RunDirectory


class RunConfig(Section):
    """The run's name and place."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory."""
    directory: str = "runs"
    """Directory of all runs."""

    @field_validator("directory")
    @classmethod
    def _no_tilde(cls, value: str) -> str:
        if value.startswith("~"):
            raise ValueError(f"{value}: only a shell replaces ~; write the path of the directory")
        return value

    @property
    def path(self) -> Path:
        """The directory of everything that the run writes."""
        return Path(self.directory) / self.name

    @property
    def files(self) -> RunDirectory:
        """Where each of these files is."""
        return RunDirectory(self.path)


# base: the student with the low-rank factors that it started with, or without any
Weights = Literal["student", "base", "reference", "teacher"]


class Config(Section):
    """A run."""

    run: RunConfig
    student: StudentConfig
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
    responses times the longest one. Here all turns of an episode are one response."""
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    normaliser: Literal["global", "per_source"] = "global"
    """With a list in `data.train`: what each term is averaged over. `global`: all samples of the
    minibatch. `per_source`: each source's samples, then the sources by weight (docs/method.md
    §6)."""
    kl: KLConfig = KLConfig()
    mixture: MixtureConfig = MixtureConfig()
    guard: GuardConfig = GuardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    fp8: Fp8Config = Fp8Config()
    memory: MemoryConfig = MemoryConfig()
    cold_start: ColdStartConfig | None = None
    """Supervised steps first; `null`: none."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault: FaultConfig = FaultConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    @model_validator(mode="before")
    @classmethod
    def _whole_objectives(cls, values: Any) -> Any:
        return with_whole_objectives(values)

    def objective_of(self, source: TrainSource) -> ObjectiveConfig:
        """The objective of a source's rows."""
        return source.objective or self.objective

    def asks_teacher(self, source: TrainSource) -> bool:
        """Whether a teacher scores a source's rows."""
        return self.objective_of(source).asks_teacher

    def teacher_of(self, source: TrainSource) -> str | None:
        """The key in `teacher.models` of the teacher of a source's rows; None: the section's own
        model, or no teacher."""
        models = self.teacher.models if self.teacher else {}
        return source.teacher if source.teacher in models and self.asks_teacher(source) else None

    @property
    def objectives_and_teachers(self) -> tuple[tuple[ObjectiveConfig, str | None], ...]:
        """Objective and `teacher_of` of all sources, each pair once, one teacher after the other.
        A sample's `objective` is a place here."""
        found: list[tuple[ObjectiveConfig, str | None]] = []
        for source in self.data.sources:
            pair = self.objective_of(source), self.teacher_of(source)
            if pair not in found:
                found.append(pair)
        names = [None, *(self.teacher.models if self.teacher else ())]
        return tuple(sorted(found, key=lambda pair: names.index(pair[1])))

    @property
    def objectives(self) -> tuple[ObjectiveConfig, ...]:
        """The objectives of `objectives_and_teachers`, in its order."""
        return tuple(objective for objective, _ in self.objectives_and_teachers)

    @property
    def has_one_objective(self) -> bool:
        """Whether all sources have the same objective, of whatever teacher."""
        return all(each == self.objectives[0] for each in self.objectives)

    def with_teacher(self, name: str | None) -> Config:
        """The config with this one of `teacher.models` as the only teacher."""
        assert self.teacher is not None
        return self.model_copy(update={"teacher": self.teacher.named(name)})

    @property
    def is_supervised(self) -> bool:
        """Whether the run trains on golden solutions only, and samples nothing."""
        return all(each.name == "sft" for each in self.objectives)

    def environment_of(self, source: TrainSource) -> EnvironmentConfig:
        """The environment of a source's rows; without a function they have one turn."""
        return source.environment or self.environment

    @property
    def max_turns(self) -> int:
        """Most turns of an episode of any source."""
        return max(self.environment_of(source).longest for source in self.data.sources)

    def budget_of(self, source: TrainSource) -> int:
        """Tokens of the longest response to a source's prompts, or of the longest turn."""
        return self.environment_of(source).own_budget or self.sampling.max_new_tokens

    @property
    def longest_turn(self) -> int:
        """Tokens of the longest turn, or response, of any source."""
        return max(map(self.budget_of, self.data.sources))

    @property
    def longest_episode(self) -> int:
        """The most tokens that the student may sample in an episode of any source."""
        sources = self.data.sources
        return max(self.environment_of(one).longest * self.budget_of(one) for one in sources)

    @property
    def longest_context(self) -> float:
        """The most tokens after the prompt that a model reads in an episode of any source."""
        return max(
            self.environment_of(one).longest * self.budget_of(one)
            + self.environment_of(one).most_observed
            for one in self.data.sources
        )

    @property
    def has_environment(self) -> bool:
        """Whether some of the training prompts have episodes of several turns."""
        return any(self.environment_of(each).function for each in self.data.sources)

    def replaced(self, **sections: dict[str, Any]) -> Config:
        """This config with other values in these sections, which are taken as they are."""
        update = {k: getattr(self, k).model_copy(update=values) for k, values in sections.items()}
        return self.model_copy(update=update)

    @property
    def evaluation_path(self) -> Path:
        """The directory of everything that `stable-opd evaluate` writes."""
        return self.run.files.evaluation

    @property
    def is_colocated(self) -> bool:
        """Whether SGLang servers share the trainer's GPUs."""
        return self.rollout.has_servers and self.rollout.sglang.placement == "colocated"

    @property
    def teacher_model(self) -> ModelConfig | None:
        """The model whose files the teacher uses: its own, or the student if it teaches itself."""
        return self.student if self.teacher and self.teacher.is_self else self.teacher

    @property
    def models_in_trainer(self) -> dict[str, ModelConfig]:
        """The student, and teachers with other files if no server holds them, by their keys."""
        models: dict[str, ModelConfig] = {"student": self.student}
        if self.teacher is not None and not self.teacher.is_served and not self.teacher.is_self:
            models["teacher"] = self.teacher
            named = self.teacher.models.items()
            models |= {f"teacher.models.{key}": own for key, own in named if own.adapter is None}
        return models

    @property
    def weights_of(self) -> dict[Fp8Role, Weights]:
        """Which weights in memory each scorer in the trainer uses, if the run has it: a model of
        its own has the scorer's name. Loading, memory, plan and offload ask only here."""
        return {"reference": self._weights_of_reference, "teacher": self._weights_of_teacher}

    @property
    def _weights_of_reference(self) -> Weights:
        """With `reference.update: every`, "base" has the reference's factors in it."""
        own = self.reference.path is not None or self.fp8.reference != self.fp8.student
        return "base" if self.student.lora and not own else "reference"

    @property
    def _weights_of_teacher(self) -> Weights:
        teacher, fp8 = self.teacher, self.fp8
        if teacher is None:
            return "teacher"
        if teacher.weights == "live":
            return "student"
        has_base = teacher.is_self or self._has_files_of_student(teacher)
        if self.student.lora and has_base and fp8.teacher == fp8.student:
            return "base"
        if not teacher.is_self:
            return "teacher"
        same = fp8.teacher == fp8.reference and teacher.weights == "frozen"
        is_start = self.reference.path is None and self.reference.update == "never"
        return "reference" if self.largest_beta and is_start and same else "teacher"

    def _has_files_of_student(self, teacher: TeacherConfig) -> bool:
        """Whether the trainer would load the same model for teacher and student. After a cold start
        the student is another model."""
        if teacher.is_served or teacher.in_turn or self.cold_start:
            return False
        keys = ("path", "revision", "architecture", "window", "rope_theta")
        return all(getattr(teacher, key) == getattr(self.student, key) for key in keys)

    @property
    def frozen_models_move(self) -> bool:
        """Whether the weights of teacher or reference follow the student."""
        moves = self.teacher is not None and self.teacher.weights == "ema"
        return moves or self.reference.update != "never"

    @property
    def largest_beta(self) -> float:
        """The largest weight that the KL to the reference may have in the run."""
        return max(self.kl.beta, self.guard.max_beta if self.guard.acts else 0.0)

    @property
    def largest_lambda(self) -> float:
        """The largest weight that golden solutions may have in the run, `sft` aside."""
        return max(self.mixture.lambda_, self.guard.max_lambda if self.guard.acts else 0.0)

    @property
    def offloaded(self) -> tuple[Offloadable, ...]:
        """`memory.offload`, or what is derived where it is null."""
        if self.memory.offload is not None:
            return self.memory.offload
        return get_args(Offloadable) if self.is_colocated else ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if reason := relations_refusal(self):
            raise ValueError(reason)
        return self
