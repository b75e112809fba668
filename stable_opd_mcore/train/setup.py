"""From a config to a run's parts: tokenizer, prompts, models, engine, objective.

Everything a user can get wrong is refused here, before the first token is drawn. Not here: the
step, the loop, or anything that changes while training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from stable_opd_mcore.config.schema import Config, ModelConfig, TeacherConfig
from stable_opd_mcore.data.chat import Tokenizer, resolve_stop_ids, same_vocabulary
from stable_opd_mcore.data.prompts import PromptOrder, PromptSet
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.losses.head import StopClass
from stable_opd_mcore.losses.objectives import Objective, build_objective
from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.families import Architecture, read_architecture
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, output_head
from stable_opd_mcore.models.huggingface import load_hf
from stable_opd_mcore.models.megatron_checkpoint import is_megatron, load_weights
from stable_opd_mcore.models.weights import copy_weights
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.rollout.build import build_engine, embedded_engine, training_sampling
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.scoring.served_teacher import ServedTeacher
from stable_opd_mcore.train.overlap import TOP_K, Observer, Observers, own_stop
from stable_opd_mcore.train.step import Run
from stable_opd_mcore.train.student import Student


def build_run(config: Config, world: World, stop_asked: Callable[[], bool] = lambda: False) -> Run:
    """Build every part on this rank.

    Args:
        stop_asked: whether the run is to end soon, so that nothing absent is waited for.

    Raises:
        UserError: settings, data, weights or layout that do not fit together; the message names
            which.
    """
    tokenizer = load_tokenizer(config)
    teachers_stops = teacher_stop_ids(config, tokenizer)
    objective = build_objective(config, tokenizer.stop_token_ids, teachers_stops)
    architecture = configured_architecture(config.student)
    prompts = load_prompts(config, tokenizer, architecture, objective)
    held_out = load_held_out(config, tokenizer, architecture)

    models = _Models(config, world, objective, tokenizer.vocab_size)
    chunks = models.load(config.student, trainable=True)
    return Run(
        config=config,
        world=world,
        tokenizer=tokenizer,
        student=Student(chunks, config.optimizer, config.train.precision),
        head=output_head(chunks, tokenizer.vocab_size),
        teacher=models.teacher(chunks),
        reference=models.reference(chunks),
        behaviour=models.behaviour(chunks) if needs_behaviour(config) else None,
        observers=models.observers(chunks, tokenizer.stop_token_ids, teachers_stops),
        engine=build_engine(config, world, chunks, tokenizer, stop_asked),
        held_out_engine=embedded_engine(world, chunks, tokenizer),
        sampling=training_sampling(config, tokenizer.stop_token_ids),
        objective=objective,
        prompts=prompts,
        held_out=held_out,
        order=PromptOrder(len(prompts), config.train.seed),
        grader=Grader(config.evaluation.grading_timeout_seconds),
    )


def needs_behaviour(config: Config) -> bool:
    """Whether the student is asked what it thinks of the rollouts before it is updated."""
    return config.train.minibatches > 1 or config.rollout.importance_correction != "none"


def load_tokenizer(config: Config) -> Tokenizer:
    """The student's tokenizer, with the ids its responses stop on."""
    path = config.tokenizer.path or config.student.path
    assert path is not None, "the schema asks for one of the two"
    return Tokenizer.load(path, config.student.stop_token_ids)


def teacher_stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The ids the teacher's responses stop on; None without a teacher.

    A teacher directory with a tokenizer of its own must have the student's vocabulary.

    Raises:
        UserError: it has another.
    """
    if config.teacher is None:
        return None
    path, given = config.teacher.path, config.teacher.stop_token_ids
    if path is not None and (Path(path) / "tokenizer.json").is_file():
        own = Tokenizer.load(path, given)
        same_vocabulary(tokenizer, own)
        return own.stop_token_ids
    if path is not None or given is not None:
        return resolve_stop_ids(path, tokenizer, given)
    return tokenizer.stop_token_ids


def load_prompts(
    config: Config, tokenizer: Tokenizer, architecture: Architecture, objective: Objective
) -> PromptSet:
    """The training prompts, with golden solutions where the objective trains on them."""
    return PromptSet(
        load_rows(config.data.train),
        tokenizer,
        config.data,
        window=architecture.max_positions,
        max_new_tokens=config.sampling.max_new_tokens if objective.needs_rollouts else 0,
        golden="required" if objective.needs_golden else "none",
    )


def load_held_out(
    config: Config, tokenizer: Tokenizer, architecture: Architecture
) -> PromptSet | None:
    """The held-out prompts, None without `data.eval`."""
    if config.data.eval is None:
        return None
    return held_out_prompts(load_rows(config.data.eval), config, tokenizer, architecture)


def held_out_prompts(
    rows: Sequence[Row], config: Config, tokenizer: Tokenizer, architecture: Architecture
) -> PromptSet:
    """Rows as prompts with room for a response of an evaluation."""
    return PromptSet(
        rows,
        tokenizer,
        config.data,
        window=architecture.max_positions,
        max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens,
        golden="none",
    )


def configured_architecture(model: ModelConfig) -> Architecture:
    """From the model's config.json, or its inline fields."""
    source = model.path if model.architecture is None else model.architecture
    assert source is not None, "the schema asks for one of the two"
    return read_architecture(source)


def load_student(config: Config, world: World, tokenizer: Tokenizer) -> list[HiddenStatesGPTModel]:
    """The student alone, frozen, for an evaluation."""
    return load_model(config, world, config.student, tokenizer.vocab_size, trainable=False)


def load_model(
    config: Config, world: World, model: ModelConfig, vocab_size: int, *, trainable: bool
) -> list[HiddenStatesGPTModel]:
    """The chunks of a model with its weights; random ones are drawn from the run's seed.

    Raises:
        UserError: fewer vocabulary entries than the tokenizer has, or what `build_model` and
            `load_hf` refuse.
    """
    architecture = configured_architecture(model)
    if architecture.vocab_size < vocab_size:
        raise UserError(
            f"{model.path or 'the inline architecture'}: vocab_size={architecture.vocab_size} is "
            f"smaller than the tokenizer's {vocab_size} tokens; take the model's own tokenizer"
        )
    reads = model.path is not None and not model.random_init
    chunks = build_model(
        architecture,
        world,
        precision=config.train.precision,
        recompute=config.train.recompute if trainable else "none",
        trainable=trainable,
        seed=None if reads else config.train.seed,
    )
    if model.path is not None and reads:
        read_weights(chunks, model.path)
    return chunks


def read_weights(chunks: Sequence[HiddenStatesGPTModel], path: str) -> None:
    """From a Hugging Face directory or a Megatron checkpoint, told by what it holds."""
    if is_megatron(path):
        load_weights(chunks, path)
    else:
        load_hf(chunks, path)


class _Models:
    """Builds the models of a run on one layout."""

    def __init__(self, config: Config, world: World, objective: Objective, vocab_size: int):
        self.config, self.world, self.objective = config, world, objective
        self.vocab_size = vocab_size

    def load(self, model: ModelConfig, *, trainable: bool) -> list[HiddenStatesGPTModel]:
        return load_model(self.config, self.world, model, self.vocab_size, trainable=trainable)

    def teacher(self, student: Sequence[HiddenStatesGPTModel]) -> Scorer | None:
        needs = self.objective.teacher_needs
        if self.config.teacher is None or needs == "none":
            return None
        top_k = self.objective.top_k if needs == "topk" else None
        stop, merged_ids = self.objective.teacher_stop, self.objective.terms.merged_ids
        if self.config.teacher.engine == "megatron":
            return self._scorer(
                self._teacher_chunks,
                student,
                stop=stop,
                top_k=top_k,
                merged_ids=merged_ids,
                hidden_alone=needs == "hidden",
            )
        if needs == "hidden":
            raise UserError(
                f"objective.name={self.config.objective.name} compares whole distributions, which "
                "a served teacher does not send; set teacher.engine=megatron"
            )
        served = self._served(self.config.teacher, stop, top_k, merged_ids)
        served.self_test(range(min(64, self.vocab_size)))
        return served

    @cached_property
    def _teacher_chunks(self) -> list[HiddenStatesGPTModel]:
        assert self.config.teacher is not None
        return self.load(self.config.teacher, trainable=False)

    def _served(
        self,
        teacher: TeacherConfig,
        stop: StopClass | None,
        top_k: int | None,
        merged_ids: tuple[int, ...] = (),
    ) -> ServedTeacher:
        return ServedTeacher(
            teacher,
            self.world,
            vocab_size=self.vocab_size,
            temperature=self.objective.temperature,
            stop=stop,
            top_k=top_k,
            merged_ids=merged_ids,
        )

    def reference(self, student: Sequence[HiddenStatesGPTModel]) -> MegatronScorer | None:
        """The student as it is before its first update, or `reference.path`."""
        needs = self.objective.reference_needs
        if needs == "none":
            return None
        path = self.config.reference.path
        frozen = self.config.student.model_copy(update={"random_init": True})
        chunks = self.load(frozen, trainable=False)
        if path is None:
            copy_weights(student, chunks)
        else:
            read_weights(chunks, path)
        return self._scorer(chunks, student, hidden_alone=needs == "hidden")

    def behaviour(self, student: Sequence[HiddenStatesGPTModel]) -> MegatronScorer:
        """The student itself, asked before the first of several updates on one batch."""
        return self._scorer(student, student, stop=self.objective.student_stop)

    def observers(
        self,
        student: Sequence[HiddenStatesGPTModel],
        student_stops: Sequence[int],
        teacher_stops: Sequence[int] | None,
    ) -> Observers | None:
        """Student and teacher, asked for their top tokens; None where no teacher is asked."""
        teacher = self.config.teacher
        if teacher is None or teacher_stops is None or self.objective.teacher_needs == "none":
            return None
        stop, top_k = own_stop(teacher_stops), min(TOP_K, self.vocab_size)
        if teacher.engine == "sglang":
            asked: Scorer = self._served(teacher, stop, top_k)
        else:
            asked = self._scorer(self._teacher_chunks, student, stop=stop, top_k=top_k)
        own = own_stop(student_stops)
        return Observers(
            student=Observer(self._scorer(student, student, stop=own, top_k=top_k), own),
            teacher=Observer(asked, stop),
        )

    def _scorer(
        self,
        chunks: Sequence[HiddenStatesGPTModel],
        student: Sequence[HiddenStatesGPTModel],
        *,
        stop: StopClass | None = None,
        top_k: int | None = None,
        merged_ids: tuple[int, ...] = (),
        hidden_alone: bool = False,
    ) -> MegatronScorer:
        return MegatronScorer(
            chunks,
            self.world,
            vocab_size=self.vocab_size,
            temperature=self.objective.temperature,
            stop=stop,
            top_k=top_k,
            merged_ids=merged_ids,
            hidden_alone=hidden_alone,
            like=output_head(student, self.vocab_size),
            chunk_tokens=self.config.train.loss_chunk_tokens,
        )
