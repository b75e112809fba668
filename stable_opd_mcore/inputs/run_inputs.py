"""What is known of a run before its models are loaded; each part is read at its first use.

The trainer and `stable-opd check` take the parts from here, so both refuse the same file in the
same words. loading.py reads them. Not here: what does not go together (commands/check).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.environment_names import environments_of
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.samples import context_samples, golden_samples
from stable_opd_mcore.data.stop_ids import stop_sources
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.downloads import with_download
from stable_opd_mcore.inputs.example_episode import Example, play_episode
from stable_opd_mcore.inputs.loading import (
    configured_architecture,
    load_held_out,
    load_prompts,
    load_rollout_prompts,
    load_teacher_tokenizer,
    load_tokenizer,
    named_teacher_stops,
    teacher_stop_ids,
)
from stable_opd_mcore.inputs.pair import EXAMPLE, ModelFiles, Pair
from stable_opd_mcore.inputs.source_uses import routes_of
from stable_opd_mcore.losses.objectives import Objective
from stable_opd_mcore.losses.source_objectives import SourceObjectives, build_source_objectives
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.description.config_fields import decoder_settings, read_fields
from stable_opd_mcore.placement.hardware import Cluster
from stable_opd_mcore.records import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The GPUs of a job."""

    cluster: Cluster
    gpu: str  # its name; "cpu": there is none, and nothing has to fit

    @property
    def on_gpu(self) -> bool:
        return self.gpu != "cpu"


class once(Generic[T]):
    """Like functools.cached_property, but a UserError is kept too and raised again."""

    def __init__(self, read: Callable[[Any], T]):
        self._read = read

    def __get__(self, inputs: RunInputs, owner: type | None = None) -> T:
        name = self._read.__name__
        if name not in inputs.parts:
            try:
                inputs.parts[name] = self._read(inputs)
            except UserError as error:
                inputs.parts[name] = error
        if isinstance(inputs.parts[name], UserError):
            raise inputs.parts[name]
        return inputs.parts[name]


class RunInputs:
    """A run's config, and what the files that it names say.

    Hub ids of its models are downloaded first, as `train` does. The parts of a missing
    model raise the error that says why it is missing.

    Without a `place`, memory and servers are not checked. `accept_changes` is --accept-changes.
    """

    def __init__(self, config: Config, place: Place | None = None, accept_changes: bool = False):
        self.place, self.accept_changes = place, accept_changes
        self.parts: dict[str, Any] = {}  # what was read, or the error that reading raised
        of_student = ("architecture",) if config.tokenizer.path else ("architecture", "tokenizer")
        of_teacher = ("teacher_architecture", "teacher_tokenizer")
        for role, parts in (("student", of_student), ("teacher", of_teacher)):
            try:
                config = with_download(config, role)
            except UserError as error:
                self.parts.update(dict.fromkeys(parts, error))
        self.config = config

    @once
    def tokenizer(self) -> Tokenizer:
        """The student's."""
        return load_tokenizer(self.config)

    @once
    def teacher_tokenizer(self) -> Tokenizer | None:
        return load_teacher_tokenizer(self.config)

    @once
    def teacher_stops(self) -> tuple[int, ...] | None:
        """None without a teacher."""
        if self.teacher_tokenizer is not None:
            return self.teacher_tokenizer.stop_token_ids
        return teacher_stop_ids(self.config, self.tokenizer)

    @once
    def named_stops(self) -> dict[str, tuple[int, ...]]:
        """Those of each of `teacher.models`."""
        return named_teacher_stops(self.config, self.tokenizer, self.teacher_tokenizer)

    @property
    def all_teacher_stops(self) -> tuple[int, ...] | None:
        """The ids that end a response of any teacher; None without one."""
        if self.teacher_stops is None:
            return None
        named = self.named_stops.values()
        return tuple(dict.fromkeys(chain(self.teacher_stops, *named)))

    @once
    def objective(self) -> SourceObjectives:
        stops = self.tokenizer.stop_token_ids, self.teacher_stops, self.named_stops
        objective = build_source_objectives(self.config, *stops)
        routes_of(objective)  # refuses a teacher without a source, and a source without its teacher
        return objective

    @once
    def architecture(self) -> Architecture:
        """The student's."""
        return configured_architecture(self.config.student)

    @once
    def teacher_architecture(self) -> Architecture | None:
        """None without another model as teacher, or where only its address is known."""
        teacher = self.config.teacher
        if teacher is None or teacher.is_self:
            return None
        if teacher.path is None and teacher.architecture is None:
            return None
        if teacher.is_served:  # SGLang builds it, whatever its family
            return None
        return configured_architecture(teacher)

    @once
    def reference_architecture(self) -> Architecture | None:
        """From the config.json in reference.path; None without that file, or without a KL."""
        path, student = self.config.reference.path, self.config.student
        if (
            not self.config.largest_beta
            or path is None
            or not (Path(path) / "config.json").is_file()
        ):
            return None
        return read_architecture(path, window=student.window, rope_theta=student.rope_theta)

    @property
    def models(self) -> dict[str, tuple[ModelConfig, Architecture]]:
        """Settings and architecture of the student and of each teacher whose architecture is known,
        by the keys of `Config.models_in_trainer`."""
        models: dict[str, tuple[ModelConfig, Architecture]] = {
            "student": (self.config.student, self.architecture)
        }
        if self.config.teacher is not None and self.teacher_architecture is not None:
            models["teacher"] = self.config.teacher, self.teacher_architecture
        for role, model in self.config.models_in_trainer.items():
            if role not in ("student", "teacher"):
                models[role] = model, configured_architecture(model)
        return models

    @once
    def pair(self) -> Pair:
        """The models of the config, and the stop class of its loss."""
        stops, objective = self.teacher_stops, self.objective
        return self._pair(self.config, objective, self.teacher_tokenizer, stops)

    @once
    def named_pairs(self) -> dict[str, Pair]:
        """The student with each of `teacher.models` that has a tokenizer of its own."""
        found: dict[str, Pair] = {}
        adapters = self.config.teacher.adapters if self.config.teacher else ()
        for name in sorted(self.named_stops.keys() - adapters):
            config, stops = self.config.with_teacher(name), self.named_stops[name]
            tokenizer = load_teacher_tokenizer(config)
            objective = next((one for one in self.objective.each if one.teacher == name), None)
            if tokenizer is not None and objective is not None:
                found[name] = self._pair(config, objective, tokenizer, stops)
        return found

    def _pair(
        self,
        config: Config,
        objective: SourceObjectives | Objective,
        tokenizer: Tokenizer | None,
        stops: tuple[int, ...] | None,
    ) -> Pair:
        """The student and the teacher of this config, whose tokenizer and stop ids these are."""
        teacher, own = config.teacher, self.tokenizer.stop_token_ids
        student = self._files("student", config.student, self.tokenizer, own)
        if teacher is None or stops is None or objective.teacher_needs == "none":
            return Pair(student, None, objective.stop_ids)
        gap = None
        if tokenizer is None and teacher.architecture is None and not teacher.is_self:
            has_path = teacher.path is not None
            gap = f"{teacher.path} has no tokenizer.json" if has_path else "teacher.path is null"
        has_own_prompt = teacher.prompt is not None
        if tokenizer is None:
            kwargs = teacher.chat_template_kwargs if has_own_prompt else None
            tokenizer = self.tokenizer.with_template_kwargs(kwargs)
        model = config.teacher_model or teacher
        files = self._files("teacher", model, tokenizer, stops)
        return Pair(student, files, objective.stop_ids, gap, has_own_prompt)

    def _files(
        self, role: str, model: ModelConfig, tokenizer: Tokenizer, stops: tuple[int, ...]
    ) -> ModelFiles:
        source = model.path if model.architecture is None else model.architecture
        if model.stop_token_ids is not None:
            sources = {f"{role}.stop_token_ids": model.stop_token_ids}
        else:
            directory = tokenizer.path if Path(tokenizer.path).is_dir() else None
            sources = stop_sources(directory, tokenizer)
        return ModelFiles(
            role=role,
            place=model.path or "inline architecture",
            tokenizer=tokenizer,
            stop_ids=stops,
            stop_sources=sources,
            settings={} if source is None else decoder_settings(read_fields(source)[1]),
            prompt_template=self.config.data.prompt_template,
            system_prompt=self.config.data.system_prompt,
        )

    @once
    def prompts(self) -> PromptSet:
        """The training prompts, with golden solutions where the objective trains on them."""
        return load_prompts(self.config, self.tokenizer, self.architecture, self.objective)

    @once
    def held_out(self) -> PromptSet | None:
        return load_held_out(self.config, self.tokenizer, self.architecture)

    @property
    def example(self) -> str:
        """The first training problem; another one where `train` refuses the rows."""
        try:
            return self.prompts.problems()[0]
        except UserError:
            return EXAMPLE

    @once
    def example_episodes(self) -> list[Example]:
        """An episode of each source, and of the held-out data, whose rows an environment plays;
        none in a run without rollouts."""
        if not self.objective.needs_rollouts or not environments_of(self.config):
            return []
        window, system_prompt = self.architecture.max_positions, self.config.data.system_prompt
        limits = window, self.config.sampling.max_new_tokens
        settings_of, held_out = environments_of(self.config), self.held_out
        prompts = [(prompt, "data.train") for prompt in self.prompts.first_played()]
        if held_out is not None:
            prompts += [(prompt, "data.eval") for prompt in held_out.first_played()]
        return [
            play_episode(
                prompt, settings_of[str(prompt.environment)], self.tokenizer, system_prompt, *limits
            ).of(setting)
            for prompt, setting in prompts
        ]

    @property
    def transcript(self) -> Sequence[Sample]:
        """An example of several turns: the contexts of an episode, or else the first golden
        solution with several turns. None without one, or if `train` refuses rows or environment.
        """
        try:
            for example in self.example_episodes:
                if example.failure is None:
                    return list(context_samples(example.rollout))
            prompt = self.prompts.golden_transcript()
        except UserError:
            return []
        return [] if prompt is None else golden_samples([prompt])

    @property
    def teacher_example(self) -> str | None:
        """teacher.prompt of the same problem; None without one, or if `train` refuses the rows. A
        function makes it of a wrong rollout with a right sibling."""
        try:
            own, ids = self.prompts.teacher, self.prompts[0].teacher_token_ids
            made = load_rollout_prompts(self.config, self.tokenizer, self.objective)
        except UserError:
            return None
        if made is not None:
            return made.example(self.prompts[0])
        return None if own is None or ids is None else own.decode(ids)
