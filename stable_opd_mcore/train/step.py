"""One training step, as the method describes it. Start reading here.

The step is written once for every layout: data-parallel ranks draw rollouts for their share of the
prompts and then all hold the same global list, from which weights, packing and metrics follow; the
loss is a plain sum whose weights hold the global normalisers. Not here: the loop around it,
evaluation, checkpoints, files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.golden import golden_samples, rollout_samples
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.data.prompts import PromptOrder, PromptSet
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.losses.head import Head
from stable_opd_mcore.losses.importance import correct, use_rollout_policy
from stable_opd_mcore.losses.objectives import Objective
from stable_opd_mcore.metrics import Mean, Metrics, Same, Sum, reduce_over_ranks
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.monitoring.health import rollout_metrics, sample_metrics, token_metrics
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.context import slice_microbatch
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import World, broadcast_object, gather_objects
from stable_opd_mcore.records import LossOutput, MicroBatch, Prompt, Rollout, Sample
from stable_opd_mcore.rollout.engine import RolloutEngine, Sampling
from stable_opd_mcore.scoring.scorer import Scorer, with_scores
from stable_opd_mcore.train.learning_rate import learning_rate
from stable_opd_mcore.train.overlap import Observers, overlap_metrics
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.student import Student


@dataclass(frozen=True)
class Run:
    """Everything one run holds on this rank; only the student's weights and optimizer change."""

    config: Config
    world: World
    tokenizer: Tokenizer
    student: Student
    head: Head | None  # the student's, on the last pipeline stage
    teacher: Scorer | None
    reference: Scorer | None
    behaviour: Scorer | None  # the student itself, asked before the first of several updates
    observers: Observers | None  # student and teacher once more, asked now and then for metrics
    engine: RolloutEngine
    held_out_engine: RolloutEngine  # evaluates; the same as `engine` in all but a replay
    sampling: Sampling
    objective: Objective
    prompts: PromptSet
    held_out: PromptSet | None
    order: PromptOrder
    grader: Grader


@dataclass(frozen=True)
class StepResult:
    state: TrainState
    metrics: Metrics  # global: the same on every rank
    rollouts: Sequence[Rollout]  # global, in the order of the prompts


def train_step(run: Run, state: TrainState) -> StepResult:
    """Sample from the student, score with teacher and reference, update the student, publish its
    weights.
    """
    config, timer = run.config, PhaseTimer(run.world.device)
    prompts = run.prompts.select(run.order.indices(state.cursor, config.rollout.prompts_per_step))

    with timer.phase("rollout"):
        rollouts = draw_rollouts(run, prompts, state)  # stamped with the weights they come from
        draw_ahead(run, state)
        samples = rollout_samples(rollouts, config.objective.masks)
        if run.objective.needs_golden:
            samples += golden_samples(prompts)

    parts = split_by_prompt(samples, config.train.minibatches)
    with timer.phase("score"):
        minibatches = [
            with_scores(
                pack_minibatch(run, part),
                teacher=run.teacher and run.teacher.about([s.prompt_id for s in part]),
                reference=run.reference,
                behaviour=run.behaviour,
            )
            for part in parts
        ]
        observed = observe(run, minibatches, parts, state.step + 1)

    minibatches, correction = off_policy(run, minibatches)

    with timer.phase("update"):
        lr = learning_rate(state.step, config.train.steps, config.optimizer)
        updates = [update(run, batches, lr, state.step + 1) for batches in minibatches]

    state = state.advance(num_prompts=len(prompts), optimizer_steps=len(updates))
    with timer.phase("sync"):
        run.engine.publish(state.weight_version)
    metrics = step_metrics(run, rollouts, samples, [observed, correction, *updates], timer)
    return StepResult(state, metrics, rollouts)


def draw_rollouts(run: Run, prompts: Sequence[Prompt], state: TrainState) -> list[Rollout]:
    """Graded rollouts of all prompts; each data-parallel rank draws and grades its share."""
    if not run.objective.needs_rollouts:
        return []
    ranks = run.world.data_size
    mine = run.engine.generate(prompts[run.world.data_rank :: ranks], run.sampling, step=state.step)
    shares = gather_objects(grade(run.world, run.grader, mine), run.world.data_group)
    samples = run.sampling.num_samples
    return [
        shares[position % ranks][position // ranks * samples + sample]
        for position in range(len(prompts))
        for sample in range(samples)
    ]


def draw_ahead(run: Run, state: TrainState) -> None:
    """With rollout.async_steps=1: start on the next step's rollouts, from the weights of now."""
    config, ranks = run.config, run.world.data_size
    if not config.rollout.async_steps or state.step + 1 == config.train.steps:
        return
    count = config.rollout.prompts_per_step
    prompts = run.prompts.select(run.order.indices(state.cursor + count, count))
    run.engine.prefetch(prompts[run.world.data_rank :: ranks], run.sampling, step=state.step + 1)


def observe(
    run: Run,
    minibatches: Sequence[Sequence[MicroBatch]],
    parts: Sequence[Sequence[Sample]],
    step: int,
) -> Metrics:
    """Every monitoring.overlap_every steps: how student and teacher see the same prefixes."""
    every, metrics = run.config.monitoring.overlap_every, Metrics()
    if run.observers is None or not every or step % every:
        return metrics
    for batches, part in zip(minibatches, parts, strict=True):
        metrics = metrics | overlap_metrics(run.observers, run.world, batches, part)
    return metrics


def off_policy(
    run: Run, minibatches: Sequence[Sequence[MicroBatch]]
) -> tuple[list[list[MicroBatch]], Metrics]:
    """Account for rollouts from other probabilities than the trainer's, as rollout.* says."""
    settings = run.config.rollout
    if settings.importance_correction != "none":
        kind, threshold = settings.importance_correction, settings.importance_threshold
        corrected, mine = [], Metrics()
        for batches in minibatches:
            batches, done = correct(batches, kind, threshold)
            corrected.append(batches)
            mine = mine | done
        if run.world.tensor_rank != 0:  # its twin speaks for it
            mine = Metrics()
        return corrected, reduce_over_ranks(mine, dist.group.WORLD)
    if settings.async_steps:
        return [use_rollout_policy(batches) for batches in minibatches], Metrics()
    return [list(batches) for batches in minibatches], Metrics()


def grade(world: World, grader: Grader, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Rollouts with their rewards. One rank of a replica judges: a time-out must not divide it."""
    judges = dist.get_rank(world.model_group) == 0
    return broadcast_object(grader.grade_rollouts(rollouts) if judges else [], world.model_group)


def pack_minibatch(run: Run, samples: Sequence[Sample]) -> list[MicroBatch]:
    """This rank's micro-batches, or its slices of them, each token carrying its global weights."""
    world = run.world
    batches = pack(
        samples,
        run.objective.token_weights(samples),
        max_tokens=run.config.train.micro_batch_tokens,
        data_rank=world.batch_rank,
        data_size=world.batch_size,
        pad_to_multiple=world.token_multiple,
        sequence_multiple=world.sequence_multiple,
        microbatch_multiple=world.microbatch_multiple,
        device=world.device,
    )
    return [slice_microbatch(batch, world.context_rank, world.context_size) for batch in batches]


def split_by_prompt(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Samples in `parts` lists; prompts are dealt in turn, and stay whole."""
    place: dict[str, int] = {}
    split: list[list[Sample]] = [[] for _ in range(parts)]
    for sample in samples:
        split[place.setdefault(sample.prompt_id, len(place) % parts)].append(sample)
    return [part for part in split if part]


def update(run: Run, batches: Sequence[MicroBatch], lr: float, step: int) -> Metrics:
    """One optimizer step on scored micro-batches; its metrics, the same on every rank."""

    def forward_step(chunk: Module, batch: MicroBatch) -> tuple[Tensor, Callable[[Tensor], tuple]]:
        return forward_hidden(chunk, batch), lambda hidden_TH: loss_of(run, batch, hidden_TH)

    run.student.zero_grad()
    results = run_forward_backward(run.student.model, batches, forward_step, world=run.world)
    grad_norm = run.student.finish_grads()

    mine = token_metrics(results, batches) if results and run.world.tensor_rank == 0 else Metrics()
    metrics = reduce_over_ranks(mine, dist.group.WORLD)
    require_finite(metrics, grad_norm, step)  # before any weight moves
    run.student.update(lr)
    losses = {  # each update has its own normaliser: several average, they do not add up
        key: Mean(loss.total, 1)
        for key, loss in metrics.items()
        if key.startswith("loss/") and isinstance(loss, Sum)
    }
    return Metrics({**metrics, **losses, "grad_norm": Mean(grad_norm, 1), "optimizer/lr": Same(lr)})


def loss_of(run: Run, batch: MicroBatch, hidden_TH: Tensor) -> tuple[Tensor, LossOutput]:
    """The loss of one micro-batch from the student's hidden states, on the last pipeline stage."""
    assert run.head is not None, "the last pipeline stage holds the output head"
    output = run.objective(
        hidden_TH.index_select(0, batch.rows_N),
        run.head,
        batch,
        teacher_head=run.teacher.head if run.teacher else None,
        reference_head=run.reference.head if run.reference else None,
        context_group=run.world.context_group,
    )
    return output.loss, output


def require_finite(metrics: Metrics, grad_norm: float, step: int) -> None:
    """Stop before damage.

    Raises:
        UserError: the loss or the gradient norm is not finite; no weight has moved yet.
    """
    loss = metrics["loss/total"].value()
    if loss is None or not math.isfinite(loss) or not math.isfinite(grad_norm):
        parts = ", ".join(
            f"{key}={metrics[key].value()}" for key in metrics if key.startswith("loss/")
        )
        raise UserError(
            f"step {step}: {parts}, grad_norm={grad_norm}: not finite, so no weight was moved; the "
            "newest checkpoint is intact. Lower optimizer.lr, or look at the step's rollouts"
        )


def step_metrics(
    run: Run,
    rollouts: Sequence[Rollout],
    samples: Sequence[Sample],
    updates: Sequence[Metrics],
    timer: PhaseTimer,
) -> Metrics:
    """Everything the step has to say, the same on every rank."""
    tokens = sum(len(s.prompt_token_ids) + len(s.response_token_ids) for s in samples)
    mine = timer.metrics(tokens) | run.engine.take_metrics() | run.grader.take_metrics("rollout")
    merged = reduce_over_ranks(mine, dist.group.WORLD) | sample_metrics(samples)
    if rollouts:
        budget = run.config.sampling.max_new_tokens
        merged = merged | rollout_metrics(rollouts, budget, run.config.monitoring)
    for metrics in updates:
        merged = merged | metrics
    return merged
