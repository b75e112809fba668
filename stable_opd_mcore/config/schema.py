"""Every setting of a run, in one frozen, typed tree. Loads without torch.

One owner per value: the temperature is in `sampling`, the reference's weight in `kl.beta`, the stop
ids of a model in its own section. Relations between settings are checked where both are known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from stable_opd_mcore.config.data import DataConfig, RewardConfig, TrainSource
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.evaluation_settings import EvaluationConfig, MonitoringConfig
from stable_opd_mcore.config.guard_settings import GuardConfig
from stable_opd_mcore.config.lora_rules import lora_refusal
from stable_opd_mcore.config.models import (
    ModelConfig,
    ReferenceConfig,
    StudentConfig,
    TeacherConfig,
    TokenizerConfig,
)
from stable_opd_mcore.config.objective_settings import KLConfig, MixtureConfig, ObjectiveConfig
from stable_opd_mcore.config.prefix_settings import prefix_refusal
from stable_opd_mcore.config.rollouts import RolloutConfig, SamplingConfig
from stable_opd_mcore.config.section import Section
from stable_opd_mcore.config.several_teachers import teachers_refusal
from stable_opd_mcore.config.source_objectives import objectives_refusal, with_whole_objectives
from stable_opd_mcore.config.training import (
    LARGEST_WATCHDOG_MINUTES,
    LONGEST_WAIT_MINUTES,
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
            models |= {f"teacher.models.{name}": own for name, own in self.teacher.models.items()}
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
        if self.teacher is None or not self.teacher.is_self:
            return "teacher"
        if self.teacher.weights == "live":
            return "student"
        if self.student.lora and self.fp8.teacher == self.fp8.student:
            return "base"
        same = self.fp8.teacher == self.fp8.reference and self.teacher.weights == "frozen"
        is_start = self.reference.path is None and self.reference.update == "never"
        return "reference" if self.largest_beta and is_start and same else "teacher"

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
        if self.student.path is None and self.student.architecture is None:
            raise ValueError(
                "neither student.path nor student.architecture is set; set path to a Hugging Face "
                "directory, or architecture for random weights"
            )
        if self.tokenizer.path is None and self.student.path is None:
            raise ValueError(
                "neither tokenizer.path nor student.path names a tokenizer; set tokenizer.path"
            )
        self._require_teacher_fits()
        self._require_lora_fits()
        if "student" in (self.memory.offload or ()) and not self.is_colocated:
            raise ValueError(
                "memory.offload names `student`, which moves only while colocated servers sample: "
                f"rollout.engine={self.rollout.engine}, rollout.sglang.placement="
                f"{self.rollout.sglang.placement}; leave it out, or colocate SGLang servers"
            )
        if self.train.share_prefixes and self.parallel.context > 1:
            raise ValueError(
                f"train.share_prefixes=true with parallel.context={self.parallel.context}: ranks "
                "that share the tokens of each sequence have no prefix in common; set one of the "
                "two to its default"
            )
        self._require_waits_below_watchdog()
        if reason := objectives_refusal(self):
            raise ValueError(reason)
        self._require_sources_fit()
        if reason := prefix_refusal(self):
            raise ValueError(reason)
        self._require_environments_fit()
        self._require_guard_fits()
        for key, weight, section in (
            ("kl.beta", self.kl.beta, self.kl),
            ("mixture.lambda", self.mixture.lambda_, self.mixture),
        ):
            if section.target is not None and not weight:
                raise ValueError(
                    f"{key.split('.')[0]}.target={section.target:g} with {key}=0: a target needs a "
                    f"weight to start from; set {key} > 0"
                )
        return self

    def _require_sources_fit(self) -> None:
        mixed = [
            each for each in self.data.sources if self.objective_of(each).name != "sft"
        ] or self.data.sources
        if self.largest_lambda and not any(each.may_have_golden for each in mixed):
            key = "mixture.lambda" if self.mixture.lambda_ else "guard.max_lambda"
            raise ValueError(
                f"{key} > 0 with no column of golden solutions in data.train: set "
                f"data.train.columns.solution, or {key}=0"
            )
        if reason := teachers_refusal(self):
            raise ValueError(reason)

    def _require_environments_fit(self) -> None:
        minutes = self.fault.watchdog_minutes or LARGEST_WATCHDOG_MINUTES
        for source in self.data.sources:
            environment = self.environment_of(source)
            reward = source.reward if source.environment else source.reward or self.reward
            if environment.function is None:
                continue
            if self.rollout.routing_replay and self.rollout.max_staleness:
                raise ValueError(
                    f"rollout.routing_replay=true with rollout.max_staleness="
                    f"{self.rollout.max_staleness} and an environment: the weights change between "
                    "turns, and the trainer replays the experts that the newest ones chose; set "
                    "routing_replay to false or max_staleness to 0"
                )
            if environment.is_agent and (reason := environment.agent_refusal(self.rollout)):
                raise ValueError(reason)
            if self.objective_of(source).discount:
                environment.require_one_context("objective.discount")
            if self.teacher and self.teacher.prompt:
                environment.require_one_context("teacher.prompt")
            if reward is not None and reward.function is not None:
                raise ValueError(
                    f"reward.function={reward.function} with environment.function="
                    f"{environment.function} for {source.path}: an environment returns the reward "
                    "of its episodes; drop one of the two"
                )
            if 2 * environment.timeout_seconds >= 60 * minutes:
                raise ValueError(
                    f"environment.timeout_seconds={environment.timeout_seconds:g}: a step that "
                    f"hangs is tried twice, and after {minutes:g} minutes the ranks that wait end "
                    f"the run (fault.watchdog_minutes); set less than {30 * minutes:g}"
                )

    def _require_teacher_fits(self) -> None:
        served = self.teacher is not None and self.teacher.is_served
        if served and self.sampling.temperature != 1:
            raise ValueError(
                f"sampling.temperature={self.sampling.temperature} with teacher.engine=sglang: a "
                "server scores prompts only at temperature 1, so its log-probabilities would not "
                "compare with the student's; set sampling.temperature=1 or teacher.engine=megatron"
            )
        if served and self.fp8.teacher:
            raise ValueError(
                f"fp8.teacher={self.fp8.teacher} with teacher.engine=sglang: the servers choose a "
                "served teacher's precision; set fp8.teacher=null or teacher.engine=megatron"
            )
        if self.teacher is not None and self.teacher.prompt_function is not None:
            fraction = self.objective.on_policy_fraction
            if fraction < 1:
                raise ValueError(
                    f"teacher.prompt.function with objective.on_policy_fraction={fraction:g}: it "
                    "reads what happened in a rollout, and prompts that train on golden solutions "
                    "have none; set on_policy_fraction=1, or a template as teacher.prompt"
                )
            if self.rollout.engine == "replay" and self.has_environment:
                raise ValueError(
                    "teacher.prompt.function with rollout.engine=replay and an environment: stored "
                    "episodes lack the messages that the function reads; sample them again"
                )
        if self.weights_of["teacher"] == "student" and self.fp8.teacher:
            raise ValueError(
                f"fp8.teacher={self.fp8.teacher} with teacher.weights=live: the teacher is the "
                "student as it trains; set fp8.teacher=null"
            )

    def _require_lora_fits(self) -> None:
        if reason := lora_refusal(self):
            raise ValueError(reason)

    def _require_guard_fits(self) -> None:
        if not self.guard.acts:
            return
        if self.is_supervised:
            raise ValueError(
                "guard.policy=act with objective.name=sft: without rollouts there is nothing to "
                "guard; set guard.policy=off"
            )
        if not self.checkpoint.every:
            raise ValueError(
                "guard.policy=act with checkpoint.every=0: there would be no checkpoint to return "
                "to; set checkpoint.every or guard.policy=warn"
            )

    def _require_waits_below_watchdog(self) -> None:
        """A wait that ends by itself must end before the watchdog takes it for a hang."""
        limit, teacher = self.fault.watchdog_minutes, self.teacher
        served = self.rollout.has_servers or (teacher and teacher.is_served)
        if served and limit is not None and limit <= LONGEST_WAIT_MINUTES:
            raise ValueError(
                f"fault.watchdog_minutes={limit:g} with SGLang servers, for which a run may wait "
                f"{LONGEST_WAIT_MINUTES} minutes: the watchdog would end a run that only waits; "
                "set it to more than that, or to null"
            )
