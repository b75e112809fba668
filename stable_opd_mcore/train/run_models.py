"""The models of a run on this rank: the student, and the scorers that its objective needs.

`Config.weights_of` says which scorers share weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from stable_opd_mcore.config.models import LoraConfig, ReferenceConfig
from stable_opd_mcore.config.schema import Config, ModelConfig, TeacherConfig
from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.loading import configured_architecture, refuse_small_vocabulary
from stable_opd_mcore.inputs.source_uses import routes_of
from stable_opd_mcore.losses.objectives import Objective
from stable_opd_mcore.losses.output_head import Head, align_head
from stable_opd_mcore.losses.source_objectives import SourceObjectives
from stable_opd_mcore.models.files.huggingface import require_base
from stable_opd_mcore.models.files.peft_loading import adapter_form, load_adapter, load_factors
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, output_head
from stable_opd_mcore.models.lora import (
    adapt,
    base_only,
    factors_as,
    set_apart,
    switched_on,
    values_of,
)
from stable_opd_mcore.models.weights import architecture_of, random_weights
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch, Sample
from stable_opd_mcore.sample_facts import SampleWeights
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.scoring.own_prompt import OwnPromptScorer
from stable_opd_mcore.scoring.scorer import Scorer, ScorerOfObjectives
from stable_opd_mcore.scoring.served import ServedScorer
from stable_opd_mcore.serving.teacher import ServedTeacher
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.reference import Moving, MovingFactors, frozen_student, read_weights
from stable_opd_mcore.train.samples.overlap import TOP_K, OverlapModel, OverlapPair, overlap_is_due
from stable_opd_mcore.train.samples.sharing import pack_micro_batches
from stable_opd_mcore.train.student import Student


def load_model(
    config: Config,
    world: World,
    model: ModelConfig,
    vocab_size: int,
    *,
    fp8: Fp8 | None = None,
    trainable: bool,
) -> list[HiddenStatesGPTModel]:
    """This rank's chunks of a model with its weights; random weights follow from train.seed.

    Raises:
        UserError: fewer vocabulary entries than the tokenizer has, or an architecture or weights
            that `build_model` or `load_hf` refuse.
    """
    architecture = configured_architecture(model)
    refuse_small_vocabulary(model.path, architecture, vocab_size)
    chunks = build_model(
        architecture,
        world,
        precision=config.train.precision,
        recompute=config.train.recompute if trainable else "none",
        fp8=fp8,
        trainable=trainable,
        seed=None,
    )
    if model.path is None:
        random_weights(chunks, config.train.seed)
    else:
        read_weights(chunks, model.path)
    return chunks


class RunModels:
    def __init__(
        self,
        config: Config,
        world: World,
        objective: SourceObjectives,
        vocab_size: int,
        progress: Callable[[], None],
    ):
        self.config, self.world, self.objective = config, world, objective
        self.vocab_size, self.progress = vocab_size, progress
        self.frozen: list[HiddenStatesGPTModel] = []  # chunks of teacher and reference
        self.heads: list[Head | None] = []  # of these
        # the teachers that take turns, by their keys in teacher.models
        self.in_turn: dict[str | None, phases.TeacherInTurn] = {}
        self._teachers: dict[str | None, partial[MegatronScorer]] = {}
        self.moving: dict[str, Moving] = {}
        fp8 = config.fp8.of("student")
        if config.student.path is not None:
            require_base(config.student.path, configured_architecture(config.student))
        self.student = load_model(
            config, world, config.student, vocab_size, fp8=fp8, trainable=True
        )
        self.head = output_head(self.student, vocab_size)
        self._megatron_scorer = partial(
            MegatronScorer,
            world=world,
            vocab_size=vocab_size,
            temperature=objective.temperature,
        )
        if config.student.lora:
            self._teach_by_base()
            self._adapt(config.student.lora)
        self._served_scorer = partial(ServedScorer, world.is_last_stage, vocab_size=vocab_size)

    def _teach_by_base(self) -> None:
        """Build scorers on the student's base, and on the base with each teacher's adapter, where
        `Config.weights_of` shares it. Runs before the student gets its own factors, because
        `set_apart` removes all factors from the chunks."""
        settings, asks = self.config.teacher, [one.teacher_needs for one in self.objective.each]
        is_base = self.config.weights_of["teacher"] == "base" and {*asks} != {"none"}
        if settings is None or settings.is_self or not is_base:
            return
        self._teachers[None] = partial(
            self._megatron_scorer,
            self.student,
            head=self.head,
            around=lambda _: base_only(self.student),
        )
        for name, directory in settings.adapters.items():
            self._teachers[name] = self._adapter_teacher(name, directory)

    def _adapt(self, lora: LoraConfig) -> None:
        """Give the student's matrices their low-rank factors."""
        adapt(self.student, lora, seed=self.config.train.seed)
        as_at_start = partial(base_only, self.student)
        if lora.path is not None:
            load_adapter(self.student, Path(lora.path), lora)
            as_at_start = partial(factors_as, self.student, values_of(self.student))
        self._around_start = lambda _: as_at_start()

    def teacher(self, memory: DeviceMemory) -> Scorer | None:
        """The teacher as the objectives need it, None where they need none. Those of
        `teacher.models` take turns in `memory`."""
        self._memory = memory
        asking = [one for one in self.objective.each if one.teacher_needs != "none"]
        if self.config.teacher is None or not asking:
            return None
        if self.config.teacher.is_served:
            return self._served(asking)
        return self._by_objective(
            lambda one: self._reading_its_prompt(
                self._teacher_scorer(one.teacher)(
                    hidden_only=one.teacher_needs == "hidden", **_asked_of_teacher(one)
                ),
                one.teacher,
            ),
            asking,
        )

    def _by_objective(
        self,
        scorer_of: Callable[[Objective], Scorer],
        asking: Sequence[Objective],
        key_of: Callable[[Objective], object] = lambda one: (
            one.teacher,
            one.teacher_needs,
            _asked_of_teacher(one),
        ),
    ) -> Scorer:
        """The scorer of each objective; one for all of `asking` that ask for the same."""
        scorers: list[tuple[object, Scorer]] = []
        for one in asking:
            key = key_of(one)
            if not any(key == known for known, _ in scorers):
                scorers.append((key, scorer_of(one)))
        if len(scorers) == 1:
            return scorers[0][1]

        def found(one: Objective) -> Scorer:
            key = key_of(one)
            return next((scorer for known, scorer in scorers if known == key), scorers[0][1])

        return ScorerOfObjectives([*map(found, self.objective.each)])

    def _served(self, asking: Sequence[Objective]) -> ServedScorer:
        """The scorer that asks servers once for all objectives. If one needs the likeliest tokens,
        servers send them for all, and the others do not read them."""
        for one in asking:
            if one.teacher_needs == "hidden":
                raise UserError(
                    f"objective.name={one.name} compares whole distributions, which a served "
                    "teacher does not send; set teacher.engine=megatron"
                )
        lists = [one for one in asking if one.teacher_needs == "topk"]
        if len({one.top_k for one in lists}) > 1:
            raise UserError(
                f"objective.top_k={' and '.join(str(one.top_k) for one in lists)} of several "
                "sources: a served teacher sends lists of one length; set the same for all"
            )
        return self._served_scorer(**_asked_of_teacher(lists[0] if lists else asking[0]))

    def served_teacher(
        self, teacher: Scorer | None, overlap: OverlapPair | None
    ) -> ServedTeacher | None:
        settings = self.config.teacher
        if settings is None or not isinstance(teacher, ServedScorer):
            return None
        of_loss = of_overlap = teacher.wanted
        if overlap is not None and isinstance(overlap.teacher.scorer, ServedScorer):
            both = overlap.teacher.scorer.wanted
            of_overlap = replace(both, top_k=max(both.top_k, of_loss.top_k))
        served = ServedTeacher(
            settings,
            vocab_size=self.vocab_size,
            temperature=self.objective.temperature,
            wanted=lambda step: of_overlap if overlap_is_due(step + 1) else of_loss,
            route_of=routes_of(self.objective),
            stop_ids=overlap.teacher.stop_ids if overlap is not None else (),
            progress=self.progress,
        )
        served.self_test(range(min(64, self.vocab_size)))
        return served

    def _reading_its_prompt(self, scorer: Scorer, name: str | None) -> Scorer:
        """The teacher in the trainer, with `teacher.prompt` if there is one."""
        config, model = self.config, self.config.with_teacher(name).teacher_model
        assert config.teacher is not None and model is not None
        if config.teacher.prompt is None:
            return scorer
        length = configured_architecture(model).attention_length

        def pack(samples: Sequence[Sample]) -> list[MicroBatch]:
            weights = SampleWeights(*np.zeros((3, len(samples))))
            return pack_micro_batches(config, self.world, samples, weights, attention_length=length)

        return OwnPromptScorer(scorer, self.world, pack)

    def reference(self) -> MegatronScorer | None:
        """The frozen reference: `reference.path`, or the student before its first update."""
        needs = self.objective.reference_needs
        if needs == "none":
            return None
        hidden_only = needs == "hidden"
        if self.config.weights_of["reference"] == "base":
            return self._base_scorer(hidden_only=hidden_only, **self._around_reference())
        return self._megatron_scorer(self._reference_chunks, hidden_only=hidden_only)

    def _around_reference(self) -> dict[str, Any]:
        """With `reference.update: every`, score with the reference's own factors, which follow."""
        settings = self.config.reference
        if settings.update == "never":
            return {}
        values = values_of(self.student)
        self.moving["reference"] = MovingFactors(settings.every, self.student, values)
        return {"around": lambda _: factors_as(self.student, values)}

    @property
    def _base_scorer(self) -> partial[MegatronScorer]:
        """Builds scorers on the student with the low-rank factors that it started with."""
        return partial(
            self._megatron_scorer,
            self.student,
            head=self.head,
            around=self._around_start,
        )

    @cached_property
    def _reference_chunks(self) -> list[HiddenStatesGPTModel]:
        """The reference's; also a self-teacher's whose `config.weights_of` are "reference"."""
        settings = self.config.reference
        return self._following("reference", settings, self.config.fp8.of("reference"))

    def _following(
        self, role: str, settings: ReferenceConfig, fp8: Fp8 | None
    ) -> list[HiddenStatesGPTModel]:
        chunks, moving = frozen_student(self.config, self.world, self.student, settings, fp8)
        self.frozen += chunks
        if moving is not None:
            self.frozen += () if moving.kept is chunks else moving.kept
            self.moving[role] = moving
        return chunks

    def keep_heads(self, *scorers: Scorer | None) -> None:
        """Keep the heads of these scorers, except the student's and those that take turns."""
        others = (self.head, *(teacher.head for teacher in self.in_turn.values()))
        heads = [scorer.head for scorer in scorers if scorer]
        self.heads += [head for head in heads if not any(head is other for other in others)]

    def behaviour(self, student: Student) -> Scorer | None:
        """The student before the step's updates, where its probabilities are compared later. The
        old policy of stale rollouts is the engine's unless they are corrected.
        """
        several = self.config.train.minibatches > 1 and not self.config.rollout.max_staleness
        corrects = self.config.rollout.importance_correction != "none"
        if not (self.objective.needs_rollouts and (several or corrects)):
            return None
        replaying = partial(student.routers.applying, trains=False, counts=False)
        return self._by_objective(
            lambda one: self._megatron_scorer(
                self.student, stop_ids=one.stop_ids, around=replaying
            ),
            [one for one in self.objective.each if one.needs_rollouts],
            lambda one: one.stop_ids,
        )

    def overlap(
        self,
        of_loss: Scorer | None,
        student_stops: Sequence[int],
        teacher_stops: Sequence[int] | None,
    ) -> OverlapPair | None:
        """Student and teacher with their most probable tokens; None where no teacher scores."""
        teacher = self.config.teacher
        if teacher is None or teacher_stops is None or of_loss is None:
            return None
        own, others = tuple(student_stops), tuple(teacher_stops)
        top_k = min(TOP_K, self.vocab_size)
        if teacher.is_served:
            assert isinstance(of_loss, ServedScorer)
            scorer: Scorer = self._served_scorer(
                stop_ids=others, top_k=top_k, columns_before=of_loss.wanted.extra_ids
            )
        else:
            scorer = self._by_objective(
                lambda one: self._reading_its_prompt(
                    self._teacher_scorer(one.teacher)(stop_ids=others, top_k=top_k), one.teacher
                ),
                [one for one in self.objective.each if one.teacher_needs != "none"],
                lambda one: one.teacher,
            )
        student = self._megatron_scorer(self.student, stop_ids=own, top_k=top_k)
        return OverlapPair(OverlapModel(student, own), OverlapModel(scorer, others))

    def _teacher_scorer(self, name: str | None) -> partial[MegatronScorer]:
        """A function that builds scorers on this teacher of `teacher.models`; None: on that of
        `teacher.path`. They share its head, which is cut into shards as the student's is."""
        if name not in self._teachers:
            self._teachers[name] = self._load_teacher(name)
        return self._teachers[name]

    def _load_teacher(self, name: str | None) -> partial[MegatronScorer]:
        of_all, fp8 = self.config.teacher, self.config.fp8.of("teacher")
        assert of_all is not None
        teacher = of_all.named(name)
        if teacher.is_self:
            return self._self_teacher(teacher, fp8)
        if name in of_all.adapters:
            return self._adapter_teacher(str(name), of_all.adapters[name])
        self._memory.take_turn()  # one is on the device at a time, also while they are loaded
        chunks = load_model(
            self.config, self.world, teacher, self.vocab_size, fp8=fp8, trainable=False
        )
        head = output_head(chunks, self.vocab_size)
        if head is not None and self.head is not None:  # both on the last stage
            head = align_head(head, like=self.head)
        if not of_all.in_turn:
            self.heads.append(head)
            self.frozen += chunks
            return partial(self._megatron_scorer, chunks, head=head)
        self.in_turn[name] = phases.TeacherInTurn(chunks, head)
        of_head, rest = phases.turn_of(name)
        turns = {
            "take_turn": partial(self._memory.take_turn, of_head, rest),
            "bring_head": partial(self._memory.take_turn, of_head),
        }
        return partial(self._megatron_scorer, chunks, head=head, **turns)

    def _adapter_teacher(self, name: str, directory: Path) -> partial[MegatronScorer]:
        """The model of `teacher.path` with the factors of an adapter."""
        base = self._teacher_scorer(None)
        (chunks,) = base.args
        if None in self.in_turn:
            self._memory.take_turn(*phases.turn_of(None))
        form = adapter_form(directory, architecture_of(chunks), name)
        adapt(chunks, form, is_trained=False)
        load_factors(chunks, directory)
        factors = set_apart(chunks)
        return partial(base, around=lambda _: switched_on(factors, chunks))

    def _self_teacher(self, teacher: TeacherConfig, fp8: Fp8 | None) -> partial[MegatronScorer]:
        config, weights = self.config, self.config.weights_of["teacher"]
        if weights == "student":
            if self.objective.teacher_needs == "hidden" and config.train.minibatches > 1:
                raise UserError(
                    f"teacher.weights=live with train.minibatches={config.train.minibatches}: "
                    f"objective.name={self.objective.name} reads the teacher's hidden states and "
                    "head, and from the second update on they are not of the same weights; set "
                    "train.minibatches=1, or teacher.weights=ema"
                )
            return partial(self._megatron_scorer, self.student, head=self.head)
        if weights == "base":
            return self._base_scorer
        if weights == "reference":
            return partial(self._megatron_scorer, self._reference_chunks)
        update = "ema" if teacher.weights == "ema" else "never"
        follows = ReferenceConfig(update=update, decay=teacher.ema_decay)
        return partial(self._megatron_scorer, self._following("teacher", follows, fp8))


def _asked_of_teacher(objective: Objective) -> dict[str, Any]:
    """The settings of a scorer for an objective."""
    return {
        "stop_ids": objective.stop_ids,
        "top_k": objective.top_k if objective.teacher_needs == "topk" else None,
        "merged_ids": objective.terms.merged_ids,
    }
