"""A run on given GPUs: its models, how they are cut, its servers, and the tokens of a step.

    run = planned_run(config, Cluster(nodes=1, gpus_per_node=8), gpu="h200")
    run.layout, run.student.stage_parameters(0), run.micro_batch_tokens

Needs each model's config.json, no weights and no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from stable_opd_mcore.commands.plan.known_models import model_source
from stable_opd_mcore.config.data import TrainSource
from stable_opd_mcore.config.objective_settings import ObjectiveConfig
from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.files.adapted import sent_names
from stable_opd_mcore.placement.draft import draft_bytes
from stable_opd_mcore.placement.hardware import Cluster, Device, device_named
from stable_opd_mcore.placement.layout import Layout, layout_of
from stable_opd_mcore.placement.model_size import WEIGHT_BYTES, ModelSize
from stable_opd_mcore.placement.topology import Topology, derive_topology, sends_adapter

PRIVILEGED_TOKENS = 1024  # assumed mean by which teacher.prompt is longer than the prompt
OBSERVED_TOKENS = 256  # assumed mean tokens of an environment's answer to a turn
PREFIX_TURNS = 8  # assumed most turns of rollout.prefix where it has no `last`


@dataclass(frozen=True)
class Work:
    """Lengths of one step's sequences that the config does not fix."""

    prompt_tokens: int = 256  # mean
    response_tokens: int = 4096  # mean sampled tokens of rollouts and golden solutions
    observed_tokens: int = 0  # mean tokens observed between the turns of an episode
    # mean length of teacher.prompt; None: PRIVILEGED_TOKENS more than the student's prompt has
    teacher_prompt_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens + self.observed_tokens


@dataclass(frozen=True)
class Models:
    """The models of a run; None where it has none."""

    student: Architecture
    teacher: Architecture | None = None  # the trainer's; a served one takes no memory here
    reference: bool = False  # the student's architecture
    # teachers that take turns with `teacher`, by their keys in Config.models_in_trainer
    in_turn: Mapping[str, Architecture] = field(default_factory=dict[str, Architecture])


@dataclass(frozen=True)
class PlannedRun:
    config: Config
    models: Models
    cluster: Cluster
    device: Device
    work: Work

    def changed(self, **sections: dict[str, Any]) -> PlannedRun:
        """The run with other values in these sections of its settings."""
        return replace(self, config=self.config.replaced(**sections))

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.config.parallel, self.cluster.trainer_gpus)

    @cached_property
    def topology(self) -> Topology:
        memory_gib = self.device.memory_gib
        return derive_topology(self.config, self.models.student, self.cluster, memory_gib)

    @cached_property
    def student(self) -> ModelSize:
        return self._size(self.models.student)

    @cached_property
    def frozen(self) -> dict[str, ModelSize]:
        """The scorers in the trainer; none where nothing is scored, as in SFT with a teacher."""
        sizes: dict[str, ModelSize] = {}
        if not self.scored:
            return sizes
        if self.models.teacher is not None:
            sizes["teacher"] = self._size(self.models.teacher)
            sizes |= {role: self._size(model) for role, model in self.models.in_turn.items()}
        if self.models.reference:
            sizes["reference"] = self.student
        return sizes

    def stays(self, role: str) -> bool:
        """Whether the scorer has weights of its own, and not those of another model, and takes no
        turns."""
        weights_of: dict[str, str] = {**self.config.weights_of}
        in_turn = role == "teacher" and self.models.in_turn
        return weights_of.get(role) == role and not in_turn

    def turn_bytes(self, stage: int) -> list[float]:
        """Weights on one GPU of each teacher that takes turns, of which it holds one at a time."""
        if not self.models.in_turn:
            return []
        found: list[float] = []
        for role, size in self.frozen.items():
            if role != "reference":
                held = self.element * size.stage_parameters(stage)
                fp8 = self.config.fp8.of(role) is not None
                found.append(held - fp8 * (self.element - 1) * size.fp8_parameters(stage))
        return found

    def of_scorer(self, role: str) -> PlannedRun:
        """The run with the sequences of this scorer: the teacher may read another prompt."""
        tokens = self.teacher_prompt_tokens
        if role == "reference" or tokens is None:
            return self
        return replace(self, work=replace(self.work, prompt_tokens=tokens))

    @property
    def teacher_prompt_tokens(self) -> int | None:
        """Mean tokens of teacher.prompt; None: the teacher reads the student's prompt."""
        if self.config.teacher is None or self.config.teacher.prompt is None:
            return None
        return self.work.teacher_prompt_tokens or self.work.prompt_tokens + PRIVILEGED_TOKENS

    def _size(self, architecture: Architecture) -> ModelSize:
        return ModelSize(architecture, self.layout, self.element)

    @property
    def element(self) -> int:
        """Bytes of an activation and of a weight."""
        return WEIGHT_BYTES[self.config.train.precision]

    @property
    def frozen_bytes(self) -> int:
        """Weights that servers get once: under factors that they get as an adapter."""
        sends_factors = sends_adapter(self.config, self.models.student)
        return self.element * self.student.total_parameters() if sends_factors else 0

    @property
    def draft_bytes(self) -> int:
        """What a server's draft adds to its weights, over its ranks."""
        return draft_bytes(self.config, self.models.student, self.element)

    @property
    def published_bytes(self) -> int:
        """What each publish sends, to however many servers."""
        whole = ModelSize(self.models.student, Layout(1))
        if self.frozen_bytes and (lora := self.config.student.lora):
            names = sent_names(self.models.student, lora.matrices)
            sent = lora.model_copy(update={"matrices": names})
            return self.element * whole.factor_parameters(sent, stage=0)
        return self.element * whole.total_parameters() if self.config.rollout.has_servers else 0

    @property
    def golden(self) -> int:
        """Golden solutions among the sequences of one step, over all ranks."""
        return math.ceil(self.config.rollout.prompts_per_step * self._share(self._trains_golden))

    @property
    def rollouts(self) -> int:
        """Rollouts of one step, over all ranks."""
        rollout = self.config.rollout
        return (
            math.ceil(rollout.prompts_per_step * self._share(self._is_sampled))
            * rollout.samples_per_prompt
        )

    def _is_sampled(self, source: TrainSource) -> bool:
        return self.config.objective_of(source).name != "sft"

    def _trains_golden(self, source: TrainSource) -> bool:
        objective = self.config.objective_of(source)
        needed = objective.name == "sft" or objective.on_policy_fraction < 1
        return source.may_have_golden and bool(needed or self.config.largest_lambda)

    def _share(self, is_one: Callable[[TrainSource], bool]) -> float:
        """The share of a step's prompts that are of such sources."""
        sources = self.config.data.sources
        weight = sum(source.weight for source in sources if is_one(source))
        return weight / sum(source.weight for source in sources)

    @property
    def sequences(self) -> int:
        """Rollouts and golden solutions of one step, over all ranks."""
        return self.rollouts + self.golden

    @property
    def trained_tokens(self) -> int:
        """Prompt and response tokens of one step, over all ranks."""
        return self.sequences * self.work.tokens

    @property
    def response_rows(self) -> int:
        """Response tokens of one step, over all ranks."""
        return self.sequences * self.work.response_tokens

    @property
    def scored(self) -> int:
        """Rollouts and off-policy golden solutions of one step, over all ranks.

        Teacher and reference score only these.
        """
        fraction = self.config.objectives[0].on_policy_fraction  # of several each has 1
        return self.sequences - math.floor(fraction * self.golden)

    def scored_by(self, role: str) -> int:
        """Those of them that this model scores: a teacher only those whose objective asks it."""
        pairs = self.config.objectives_and_teachers
        if role == "reference" or len(pairs) == 1:
            return self.scored
        name = role.removeprefix("teacher.models.") if role != "teacher" else None
        return sum(
            self._scored_of(pair) for pair in pairs if pair[0].asks_teacher if pair[1] == name
        )

    def _scored_of(self, pair: tuple[ObjectiveConfig, str | None]) -> int:
        """Those of them that have this objective and teacher."""
        config, sampled = self.config, self._share(self._is_sampled)
        share = self._share(lambda one: (config.objective_of(one), config.teacher_of(one)) == pair)
        return math.ceil(self.scored * share / sampled) if pair[0].name != "sft" else 0

    @property
    def scored_rows(self) -> int:
        """Response tokens of one step that teacher and reference score, over all ranks."""
        return self.scored * self.work.response_tokens

    @property
    def kinds(self) -> list[int]:
        """Sequences of one step that share micro-batches: first the scored ones, those of each
        objective, then others."""
        scored, pairs = [self.scored], self.config.objectives_and_teachers
        if len(pairs) > 1:
            scored = [*map(self._scored_of, pairs)]
        return [count for count in (*scored, self.sequences - self.scored) if count]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: a prompt and a response, or an episode's context."""
        observed = (self.config.max_turns - 1) * OBSERVED_TOKENS
        observed += most_prefix_turns(self.config) * (self.config.longest_turn + OBSERVED_TOKENS)
        length = self.work.prompt_tokens + self.longest_sampled + observed
        return length if not observed else min(length, self.models.student.max_positions)

    @property
    def longest_sampled(self) -> int:
        """The most tokens that one rollout samples in sequence, with all turns in one context."""
        most = self.config.longest_episode
        room = self.models.student.max_positions - self.work.prompt_tokens
        return most if self.config.max_turns == 1 else min(most, room)

    def share(self, sequences: int) -> int:
        """Tokens that one data-parallel rank has of these sequences of a step in a minibatch."""
        of_rank = math.ceil(sequences / (self.layout.data * self.config.train.minibatches))
        repeated = 0  # prompts that other sequences of the rank have computed
        if self.config.train.share_prefixes:
            repeated = of_rank - math.ceil(of_rank / self.config.rollout.samples_per_prompt)
        return of_rank * self.work.tokens - repeated * self.work.prompt_tokens

    @property
    def largest_share(self) -> int:
        """Tokens of one rank in one minibatch, at least the longest sequence, up to 1,024 more."""
        return 1024 * math.ceil(max(self.share(max(self.kinds)), self.longest) / 1024)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch: a sequence longer than the budget has its own."""
        budget = max(self.config.train.micro_batch_tokens, self.longest)
        return min(budget, self.share(max(self.kinds)))

    @property
    def rank_tokens(self) -> float:
        """Tokens of the largest micro-batch that one context rank holds."""
        return self.micro_batch_tokens / self.layout.context

    def num_micro_batches_of(self, sequences: int) -> int:
        """One rank's micro-batches of one kind's `sequences` in an optimizer step.

        As data/packing.py makes them: an interleaved pipeline reads each kind in groups, one
        micro-batch for each stage.
        """
        needed = math.ceil(self.share(sequences) / self.micro_batch_tokens)
        group = self.layout.pipeline if self.config.parallel.virtual_pipeline else 1
        return group * math.ceil(needed / group)

    @property
    def num_micro_batches(self) -> int:
        """One rank's micro-batches of all kinds in an optimizer step."""
        return sum(map(self.num_micro_batches_of, self.kinds))


def planned_run(
    config: Config, cluster: Cluster, gpu: str = "h200", work: Work | None = None
) -> PlannedRun:
    """The run on GPUs of this name."""
    device, models = device_named(gpu), read_models(config)
    if cluster.server_nodes:  # rollouts from SGLang, as in slurm/servers.sh
        sglang = config.rollout.sglang.model_copy(update={"placement": "external"})
        config = config.replaced(rollout={"engine": "sglang", "sglang": sglang})
    return PlannedRun(config, models, cluster, device, work or default_work(config))


def default_work(config: Config) -> Work:
    """Assume turns of half the limit, episodes of half of `max_turns` in one context, and half the
    turns that rollout.prefix has at most."""
    prefix = config.rollout.prefix
    if config.max_turns == 1 and prefix.by is None:
        return Work(response_tokens=max(1, config.longest_turn // 2))
    room = _architecture(config.student, "student").max_positions - Work().prompt_tokens
    sampled = observed = total = 0.0
    for source in config.data.sources:
        turns, weight = (config.environment_of(source).longest + 1) // 2, source.weight
        of_turn = max(1, config.budget_of(source) // 2)
        played = prefix.share * (prefix.first + most_prefix_turns(config)) / 2
        observed_in_one = (turns - 1) * OBSERVED_TOKENS + played * (of_turn + OBSERVED_TOKENS)
        lengths = turns * of_turn, observed_in_one
        part = weight * min(1.0, room / sum(lengths))
        sampled, observed = sampled + part * lengths[0], observed + part * lengths[1]
        total += weight
    return Work(response_tokens=round(sampled / total), observed_tokens=round(observed / total))


def most_prefix_turns(config: Config) -> int:
    """Turns of the longest prefix of a rollout, which the first step may have."""
    prefix = config.rollout.prefix
    return 0 if prefix.by is None else prefix.last or max(PREFIX_TURNS, prefix.first)


def read_models(config: Config) -> Models:
    """Architectures of the models on the trainer's GPUs."""
    models = config.models_in_trainer.items()
    sizes = {name: _architecture(model, name) for name, model in models}
    student, is_self = sizes["student"], config.teacher is not None and config.teacher.is_self
    teacher = student if is_self else sizes.get("teacher")
    in_turn = {name: size for name, size in sizes.items() if name not in ("student", "teacher")}
    return Models(student, teacher, config.largest_beta > 0, in_turn)


def _architecture(model: ModelConfig, name: str) -> Architecture:
    source, _ = model_source(model, name)
    return read_architecture(source, window=model.window, rope_theta=model.rope_theta)


def plan_topology(config: Config, cluster: Cluster, gpu: str) -> Topology:
    """The topology on GPUs of this name; `cpu`: on a CPU, as the tests have it."""
    memory_gib = None if gpu == "cpu" else device_named(gpu).memory_gib
    return derive_topology(config, _architecture(config.student, "student"), cluster, memory_gib)
