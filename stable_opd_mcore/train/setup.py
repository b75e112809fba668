"""Build a run's parts from its config: tokenizer, prompts, models, engine, objective.

Settings, data and weights that do not fit together are refused here, before the first token is
sampled. Not here: the step, the loop, or anything that changes while training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

from stable_opd_mcore.config.schema import Config, ModelConfig, TeacherConfig
from stable_opd_mcore.data.chat import Tokenizer, resolve_stop_ids, same_vocabulary
from stable_opd_mcore.data.prompts import PromptOrder, PromptSet
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.losses.objectives import Objective, build_objective
from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.families import Architecture, read_architecture
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, output_head
from stable_opd_mcore.models.huggingface import load_hf
from stable_opd_mcore.models.megatron_checkpoint import is_megatron, load_weights
from stable_opd_mcore.models.weights import architecture_of, copy_weights, random_weights
from stable_opd_mcore.parallel.determinism import make_deterministic
from stable_opd_mcore.parallel.world import World, start_world
from stable_opd_mcore.rollout.build import build_engine, embedded_engine, training_sampling
from stable_opd_mcore.rollout.sglang.group import prepare_nccl
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.scoring.served_teacher import ServedTeacher
from stable_opd_mcore.train.overlap import TOP_K, OverlapModel, OverlapPair
from stable_opd_mcore.train.phases import device_memory
from stable_opd_mcore.train.step import Run
from stable_opd_mcore.train.student import Student


def start_configured_world(config: Config) -> World:
    """Start the config's world, after the settings that torch and NCCL read as they start.

    Raises:
        UserError: as `start_world`.
    """
    if config.train.deterministic:
        make_deterministic()
    prepare_nccl(config)
    return start_world(config.parallel, config.train.seed)


def build_run(
    config: Config,
    world: World,
    stop_requested: Callable[[], bool] = lambda: False,
    progress: Callable[[], None] = lambda: None,
) -> Run:
    """Build every part on this rank.

    Args:
        stop_requested: whether a signal has asked the run to stop; then absent servers are not
            waited for.
        progress: called from any thread whenever a server has answered or a token is decoded.

    Raises:
        UserError: settings, data, weights or layout that do not fit together.
    """
    tokenizer = load_tokenizer(config)
    teacher_stops = teacher_stop_ids(config, tokenizer)
    objective = build_objective(config, tokenizer.stop_token_ids, teacher_stops)
    architecture = configured_architecture(config.student)
    prompts = load_prompts(config, tokenizer, architecture, objective)
    held_out = load_held_out(config, tokenizer, architecture)

    models = _Models(config, world, objective, tokenizer.vocab_size, progress)
    student = Student(models.student, config.optimizer, config.train.precision)
    teacher, reference = models.teacher(), models.reference()
    overlap = models.overlap(tokenizer.stop_token_ids, teacher_stops)
    scorers = (teacher, reference, overlap and overlap.teacher.scorer)
    heads = [scorer.head for scorer in scorers if scorer is not None]
    memory = device_memory(config, world, student, models.frozen, heads)
    return Run(
        config=config,
        world=world,
        tokenizer=tokenizer,
        student=student,
        head=models.head,
        teacher=teacher,
        reference=reference,
        behaviour=models.behaviour(),
        overlap=overlap,
        memory=memory,
        engine=build_engine(
            config, world, models.student, tokenizer, stop_requested, progress, memory
        ),
        held_out_engine=embedded_engine(world, models.student, tokenizer, progress)
        if config.rollout.engine == "replay"
        else None,
        sampling=training_sampling(config, tokenizer.stop_token_ids),
        objective=objective,
        prompts=prompts,
        held_out=held_out,
        order=PromptOrder(len(prompts), config.train.seed),
        grader=Grader(config.evaluation.grading_timeout_seconds),
    )


def load_tokenizer(config: Config) -> Tokenizer:
    """The student's tokenizer, with the student's stop ids."""
    path = config.tokenizer.path or config.student.path
    assert path is not None, "the schema asks for one of the two"
    return Tokenizer.load(path, config.student.stop_token_ids)


def teacher_stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The ids that end the teacher's responses; None without a teacher.

    Raises:
        UserError: the teacher's directory holds a tokenizer with another vocabulary than the
            student's.
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
    """The training prompts, with golden solutions where the objective trains on them.

    Raises:
        UserError: rows that cannot be used, or fewer of them than rollout.prompts_per_step.
    """
    prompts = PromptSet(
        load_rows(config.data.train),
        tokenizer,
        config.data,
        window=architecture.max_positions,
        max_new_tokens=config.sampling.max_new_tokens if objective.needs_rollouts else 0,
        golden="required" if objective.needs_golden else "none",
    )
    if config.rollout.prompts_per_step > len(prompts):
        raise UserError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} exceeds the "
            f"{len(prompts)} usable rows of data.train ({prompts.num_dropped} dropped): a step "
            "would train on one prompt several times; lower it, or add rows"
        )
    return prompts


def load_held_out(
    config: Config, tokenizer: Tokenizer, architecture: Architecture
) -> PromptSet | None:
    """The held-out prompts; None without `data.eval`."""
    if config.data.eval is None:
        return None
    return held_out_prompts(load_rows(config.data.eval), config, tokenizer, architecture)


def held_out_prompts(
    rows: Sequence[Row], config: Config, tokenizer: Tokenizer, architecture: Architecture
) -> PromptSet:
    """Rows as prompts that leave room for an evaluation's response."""
    return PromptSet(
        rows,
        tokenizer,
        config.data,
        window=architecture.max_positions,
        max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens,
        golden="none",
    )


def configured_architecture(model: ModelConfig) -> Architecture:
    """The architecture in the model's config.json, or the inline one."""
    source = model.path if model.architecture is None else model.architecture
    assert source is not None, "the schema asks for one of the two"
    return read_architecture(source)


def load_model(
    config: Config, world: World, model: ModelConfig, vocab_size: int, *, trainable: bool
) -> list[HiddenStatesGPTModel]:
    """This rank's chunks of a model with its weights; random weights are drawn from train.seed.

    Raises:
        UserError: fewer vocabulary entries than the tokenizer has, or an architecture or weights
            that `build_model` or `load_hf` refuse.
    """
    architecture = configured_architecture(model)
    if architecture.vocab_size < vocab_size:
        raise UserError(
            f"{model.path or 'the inline architecture'}: vocab_size={architecture.vocab_size} is "
            f"smaller than the tokenizer's {vocab_size} tokens; take the model's own tokenizer"
        )
    chunks = build_model(
        architecture,
        world,
        precision=config.train.precision,
        recompute=config.train.recompute if trainable else "none",
        trainable=trainable,
        seed=None,
    )
    if model.path is None or model.random_init:
        random_weights(chunks, config.train.seed)
    else:
        read_weights(chunks, model.path)
    return chunks


def load_reference(
    config: Config, world: World, student: Sequence[HiddenStatesGPTModel]
) -> list[HiddenStatesGPTModel]:
    """The frozen reference's chunks: `reference.path`, or the student's present weights.

    Raises:
        UserError: weights that `load_hf` or `load_weights` refuse.
    """
    chunks = build_model(
        architecture_of(student),
        world,
        precision=config.train.precision,
        trainable=False,
        seed=None,
    )
    if config.reference.path is None:
        copy_weights(student, chunks)
    else:
        read_weights(chunks, config.reference.path)
    return chunks


def read_weights(chunks: Sequence[HiddenStatesGPTModel], path: str) -> None:
    """Read weights from a Hugging Face directory or a Megatron checkpoint."""
    if is_megatron(path):
        load_weights(chunks, path)
    else:
        load_hf(chunks, path)


class _Models:
    """The models of a run on this rank: the student, and the scorers that the objective needs."""

    def __init__(
        self,
        config: Config,
        world: World,
        objective: Objective,
        vocab_size: int,
        progress: Callable[[], None],
    ):
        self.config, self.world, self.objective = config, world, objective
        self.vocab_size, self.progress = vocab_size, progress
        self.frozen: list[HiddenStatesGPTModel] = []  # chunks of teacher and reference
        self.student = self._load(config.student, trainable=True)
        self.head = output_head(self.student, vocab_size)
        self._megatron_scorer = partial(
            MegatronScorer,
            world=world,
            vocab_size=vocab_size,
            temperature=objective.temperature,
            like=self.head,
            block_rows=config.train.loss_block_tokens,
        )

    def teacher(self) -> Scorer | None:
        """The teacher as the objective needs it, None where it needs none."""
        needs = self.objective.teacher_needs
        if self.config.teacher is None or needs == "none":
            return None
        stop_ids, merged_ids = self.objective.stop_ids, self.objective.terms.merged_ids
        top_k = self.objective.top_k if needs == "topk" else None
        if self.config.teacher.engine == "megatron":
            return self._megatron_scorer(
                self._teacher_chunks,
                stop_ids=stop_ids,
                top_k=top_k,
                merged_ids=merged_ids,
                hidden_alone=needs == "hidden",
            )
        if needs == "hidden":
            raise UserError(
                f"objective.name={self.config.objective.name} compares whole distributions, which "
                "a served teacher does not send; set teacher.engine=megatron"
            )
        served = self._served_teacher(self.config.teacher, stop_ids, top_k, merged_ids)
        served.self_test(range(min(64, self.vocab_size)))
        return served

    def reference(self) -> MegatronScorer | None:
        """The frozen reference: `reference.path`, or the student before its first update."""
        needs = self.objective.reference_needs
        if needs == "none":
            return None
        chunks = load_reference(self.config, self.world, self.student)
        self.frozen += chunks
        return self._megatron_scorer(chunks, hidden_alone=needs == "hidden")

    def behaviour(self) -> MegatronScorer | None:
        """The student before the step's updates, where its probabilities are compared later."""
        config = self.config
        if config.train.minibatches == 1 and config.rollout.importance_correction == "none":
            return None
        return self._megatron_scorer(self.student, stop_ids=self.objective.stop_ids)

    def overlap(
        self, student_stops: Sequence[int], teacher_stops: Sequence[int] | None
    ) -> OverlapPair | None:
        """Student and teacher with their most probable tokens; None where no teacher scores."""
        teacher = self.config.teacher
        if teacher is None or teacher_stops is None or self.objective.teacher_needs == "none":
            return None
        own, others = tuple(student_stops), tuple(teacher_stops)
        top_k = min(TOP_K, self.vocab_size)
        if teacher.engine == "sglang":
            scorer: Scorer = self._served_teacher(teacher, others, top_k)
        else:
            scorer = self._megatron_scorer(self._teacher_chunks, stop_ids=others, top_k=top_k)
        return OverlapPair(
            student=OverlapModel(
                self._megatron_scorer(self.student, stop_ids=own, top_k=top_k), own
            ),
            teacher=OverlapModel(scorer, others),
        )

    def _load(self, model: ModelConfig, *, trainable: bool) -> list[HiddenStatesGPTModel]:
        chunks = load_model(self.config, self.world, model, self.vocab_size, trainable=trainable)
        if not trainable:
            self.frozen += chunks
        return chunks

    @cached_property
    def _teacher_chunks(self) -> list[HiddenStatesGPTModel]:
        assert self.config.teacher is not None
        return self._load(self.config.teacher, trainable=False)

    def _served_teacher(
        self,
        teacher: TeacherConfig,
        stop_ids: tuple[int, ...],
        top_k: int | None,
        merged_ids: tuple[int, ...] = (),
    ) -> ServedTeacher:
        return ServedTeacher(
            teacher,
            self.world,
            vocab_size=self.vocab_size,
            temperature=self.objective.temperature,
            stop_ids=stop_ids,
            top_k=top_k,
            merged_ids=merged_ids,
            progress=self.progress,
        )
