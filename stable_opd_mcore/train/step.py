"""One training step of on-policy distillation. Start reading here.

The student samples responses, teacher and reference score them, the student is updated, and the
rollout engine receives its new weights. The code is the same for every parallel layout: each
data-parallel rank samples for its share of the prompts. Then every rank knows lengths and rewards
of all samples, but tokens only of those that it trains on (train/samples/sharing.py). Token weights
follow from these facts and contain the global normalisers, so the loss is a plain sum over tokens,
micro-batches and ranks.

Not here: how rollouts are drawn (train/samples/drawing.py); the loop around the step, evaluation,
checkpoints, files (loop.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.packing import costs
from stable_opd_mcore.data.responses import version_metrics
from stable_opd_mcore.errors import NotFiniteError
from stable_opd_mcore.losses.fused import finite_scores, require_finite_scores
from stable_opd_mcore.losses.token_weights import (
    correct_importance,
    use_rollout_policy,
)
from stable_opd_mcore.metrics import Mean, Metrics, Same, Sum, reduce_over_ranks
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.weights import refuse_non_finite
from stable_opd_mcore.monitoring.health import sample_metrics, token_metrics
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.transfers import OnHost
from stable_opd_mcore.parallel.world import World, object_group
from stable_opd_mcore.records import (
    LossOutput,
    MicroBatch,
    Rollout,
    Sample,
    SampleFacts,
)
from stable_opd_mcore.scoring.scorer import with_scores
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.learning_rate import learning_rate
from stable_opd_mcore.train.oversight.guard import Action, decide
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.samples.drawing import (
    draw_rollouts,
    golden_solutions,
    measured,
    own_prompts,
    prefetch_rollouts,
    rollouts_as_samples,
    rows_of_step,
)
from stable_opd_mcore.train.samples.overlap import overlap_is_due, overlap_metrics
from stable_opd_mcore.train.samples.served_scores import begin_scoring
from stable_opd_mcore.train.samples.sharing import Minibatch, gather_facts, micro_batches, share_out
from stable_opd_mcore.train.samples.source_metrics import (
    NO_GROUPS,
    Groups,
    groups_of,
    source_metrics,
)
from stable_opd_mcore.train.samples.token_values import Record, RolloutValues, TokenRecorder
from stable_opd_mcore.train.strengths import adapt, strengths_of


@dataclass(frozen=True)
class StepResult:
    state: TrainState
    metrics: Metrics  # global: the same on every rank
    rollouts: Sequence[Rollout]  # of this data-parallel rank, in the order of its prompts
    actions: Sequence[Action]  # the guard's after the step
    token_values: Sequence[RolloutValues]  # the first rollouts, for readers; on rank 0 only


def train_step(run: Run, state: TrainState) -> StepResult:
    """Sample from the student, score with teacher and reference, update the student, publish its
    weights.

    Raises:
        UserError: the loss or the gradient norm is not finite.
        EngineLost, TeacherLost: no server answers; no weight has changed.
    """
    config = run.config
    timer = PhaseTimer(run.world.device, run.phase, run.idle_clocks)
    run = at_step(run, state)

    with timer.phase("rollout"):
        run.memory.keep_only(*phases.ROLLOUT)
        prefetch_rollouts(run, state)
        rows = rows_of_step(run, state)
        prompts = own_prompts(run, rows)
        golden = golden_solutions(run, prompts, state.cursor)
        scored_golden = begin_scoring(run, golden, state.step)
        has_servers = config.rollout.engine == "sglang"
        waiting = timer.part("wait") if has_servers else nullcontext()
        rollouts = draw_rollouts(run, prompts, state.step, waiting)
        samples = rollouts_as_samples(run, prompts, rollouts, state.cursor)
        drawn = begin_scoring(run, samples, state.step)() + scored_golden()
        numbers = range(state.cursor, state.cursor + len(rows))
        facts = gather_facts(run.world, drawn, numbers, run.order.sources(rows))
        parts = minibatches_of(run, drawn, facts)

    with timer.phase("score"):
        run.memory.hold(*phases.SCORE)
        minibatches = [score(run, pack_minibatch(run, part), part) for part in parts]
        overlap = compare_models(run, minibatches, parts, state.step + 1)
    minibatches, correction = correct_mismatch(run, minibatches)

    with timer.phase("update"):
        run.memory.hold(*phases.UPDATE)
        lr = learning_rate(state.step, config.train.steps, config.optimizer)
        values = TokenRecorder(config, facts)
        updates = [
            update(run, batches, lr, state.step + 1, values.of(part), groups)
            for batches, part, groups in zip(
                minibatches, parts, [_groups(run, facts, part) for part in parts], strict=True
            )
        ]
    del minibatches  # a publish gathers whole tensors in the memory of the scores

    trained_version = state.weight_version
    state = state.advance(prompts=len(rows), optimizer_steps=len(updates))
    for moving in run.moving.values():
        moving.follow(state.step, run.memory)
    with timer.phase("sync"):
        run.engine.publish(state.weight_version)
    reduced = [overlap, correction, *updates]
    metrics = step_metrics(run, rollouts, facts, reduced, timer, trained_version)
    state, actions = guarded(config, state, metrics)
    token_values = values.gather(run.world, rollouts)
    return StepResult(state, metrics, rollouts, actions, token_values)


def at_step(run: Run, state: TrainState) -> Run:
    """The run with the beta, lambda and length budget of the step after `state`."""
    now = strengths_of(run.config, state.adapted, state.guard)
    objective = run.objective.with_strengths(now.beta, now.lambda_)
    reference = None if objective.reference_needs == "none" else run.reference
    budget = run.config.sampling.budget(state.step)
    sampling = replace(run.sampling, max_new_tokens=budget)
    return replace(run, objective=objective, reference=reference, sampling=sampling)


def guarded(
    config: Config, state: TrainState, metrics: Metrics
) -> tuple[TrainState, Sequence[Action]]:
    """The state with adapted weights and the guard's decision after the step, and its actions.

    While the length budget grows, the guard rests: a short budget truncates by design.
    """
    values, every = metrics.values_by_key(), config.checkpoint.every
    state = replace(state, adapted=adapt(config, state.adapted, values))
    if config.sampling.budget(state.step - 1) < config.sampling.max_new_tokens:
        return state, ()
    saved = bool(every) and state.step % every == 0
    guard, actions = decide(config.guard, state.guard, state.step, values, saved)
    return replace(state, guard=guard), actions


def minibatches_of(run: Run, drawn: Sequence[Sample], facts: SampleFacts) -> list[Minibatch]:
    """What this rank trains on in each minibatch: of all samples, as `facts` tells, whichever rank
    has drawn them.
    """
    world, length = run.world, run.student.chunks[0].architecture.attention_length
    return share_out(
        world,
        drawn,
        facts,
        run.config.train.minibatches,
        run.objective.sample_weights,
        lambda tokens_B: costs(tokens_B, length, world.sequence_multiple),
    )


def pack_minibatch(run: Run, minibatch: Minibatch) -> list[MicroBatch]:
    """This rank's micro-batches of a minibatch on its device, sliced under context parallelism."""
    architecture = run.student.chunks[0].architecture
    experts = architecture.experts if run.config.rollout.routing_replay else None
    return micro_batches(
        run.config,
        run.world,
        minibatch.samples,
        minibatch.weights,
        attention_length=architecture.attention_length,
        routing=experts and (architecture.num_layers, experts.per_token),
    )


def score(run: Run, batches: Sequence[MicroBatch], minibatch: Minibatch) -> list[MicroBatch]:
    """The micro-batches with the scores of teacher, reference and behaviour policy."""
    return with_scores(
        batches,
        minibatch.samples,
        teacher=run.teacher,
        reference=run.reference,
        behaviour=run.behaviour,
    )


def compare_models(
    run: Run,
    minibatches: Sequence[Sequence[MicroBatch]],
    parts: Sequence[Minibatch],
    step: int,
) -> Metrics:
    """Every overlap.EVERY steps: metrics of the most probable tokens of both models."""
    metrics = Metrics()
    if run.overlap is None or not overlap_is_due(step):
        return metrics
    for batches, part in zip(minibatches, parts, strict=True):
        row_metrics = overlap_metrics(run.overlap, batches, part.samples)
        metrics = metrics | reduce_row_metrics(run.world, row_metrics)
    return metrics


def correct_mismatch(
    run: Run, minibatches: Sequence[Sequence[MicroBatch]]
) -> tuple[Sequence[Sequence[MicroBatch]], Metrics]:
    """Account for rollouts whose engine had other probabilities than the student has now.

    rollout.importance_correction multiplies their token weights. Without it, stale rollouts
    (rollout.max_staleness) use the engine's log-probabilities as the old policy's.
    """
    settings = run.config.rollout
    if settings.importance_correction == "none":
        if settings.max_staleness:
            minibatches = [use_rollout_policy(batches) for batches in minibatches]
        return minibatches, Metrics()
    corrected, metrics = [], Metrics()
    for batches in minibatches:
        batches, batch_metrics = correct_importance(
            batches,
            settings.importance_correction,
            settings.importance_threshold,
            sampled_kl=run.config.kl.estimator != "exact",
        )
        corrected.append(batches)
        metrics = metrics | batch_metrics
    return corrected, reduce_row_metrics(run.world, metrics)


def _groups(run: Run, facts: SampleFacts, part: Minibatch) -> Groups:
    """Which of this rank's samples of a minibatch are of each source."""
    return groups_of(run.config, facts.select(part.places).source_B)


def update(
    run: Run,
    batches: Sequence[MicroBatch],
    lr: float,
    step: int,
    record: Record = lambda *_: None,
    groups: Groups = NO_GROUPS,
) -> Metrics:
    """One optimizer step on scored micro-batches; returns its metrics, the same on every rank.

    Args:
        record: receives the results of the loss.
        groups: as of `token_metrics`.

    Raises:
        UserError: a score, the loss, the gradient norm or an updated weight is not finite.
    """

    def forward_step(
        model_chunk: Module, batch: MicroBatch
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, LossOutput]]]:
        with run.student.routers.applying(batch, trains=True):
            hidden_TH = forward_hidden(model_chunk, batch)
        return hidden_TH, lambda hidden_TH: loss_of(run, batch, hidden_TH)

    run.student.zero_grad()
    results = run_forward_backward(run.student.model, batches, forward_step, world=run.world)
    record(results, batches)
    row_metrics = token_metrics(results, batches, run.config.sampling.max_new_tokens, groups)
    scored = list(zip(batches, results, strict=True)) if results else []  # on the last stage
    finite = [OnHost(finite_scores(*pair)) for pair in scored]
    grad_norm = run.student.finish_grads()  # the host waits for the device here
    for is_finite, pair in zip(finite, scored, strict=True):
        if not is_finite.values():
            require_finite_scores(*pair)
    metrics = reduce_row_metrics(run.world, row_metrics()) | run.student.routers.take()
    require_finite(metrics, grad_norm, step)  # before any weight changes
    run.student.update(lr)
    refuse_non_finite(run.student.chunks, f"step {step}: nothing is saved or published")
    # Each update has its own normaliser, so a step reports the mean of its updates' losses.
    losses = {
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
    # The results are kept until the step ends. A loss with its graph would keep the tensors of its
    # micro-batch on the device until then.
    return output.loss, replace(output, loss=output.loss.detach())


def require_finite(metrics: Metrics, grad_norm: float, step: int) -> None:
    """Stop before an update that would damage the weights.

    Raises:
        NotFiniteError: the loss or the gradient norm is not finite; no weight has changed.
    """
    loss = metrics["loss/total"].value()
    if loss is None or not math.isfinite(loss) or not math.isfinite(grad_norm):
        losses = ", ".join(
            f"{key}={metrics[key].value()}" for key in metrics if key.startswith("loss/")
        )
        raise NotFiniteError(
            f"step {step}: {losses}, grad_norm={grad_norm}: not finite. The update was not made "
            "and the newest checkpoint is intact. Lower optimizer.lr, or look at the step's "
            "rollouts"
        )


def reduce_row_metrics(world: World, metrics: Metrics) -> Metrics:
    """Add metrics of token rows over all ranks.

    All tensor-parallel ranks hold the same rows; only rank 0 contributes them.
    """
    own = metrics if world.tensor_rank == 0 else Metrics()
    return reduce_over_ranks(own, object_group(dist.group.WORLD))


def step_metrics(
    run: Run,
    rollouts: Sequence[Rollout],
    facts: SampleFacts,
    reduced: Sequence[Metrics],
    timer: PhaseTimer,
    trained_version: int,
) -> Metrics:
    """All metrics of the step, the same on every rank.

    Args:
        rollouts: of this data-parallel rank.
        facts: of all samples.
        reduced: metrics that are already the same on every rank.
        trained_version: of the weights that the step has updated.
    """
    num_tokens = int((facts.prompt_tokens_B + facts.response_tokens_B).sum())
    own = timer.metrics(num_tokens) | run.engine.take_metrics()
    metrics = sample_metrics(facts) | source_metrics(run.config, run.objective, facts)
    if run.objective.needs_rollouts:
        own = own | measured(run, rollouts, run.sampling.max_new_tokens)
        max_staleness = run.config.rollout.max_staleness
        if max_staleness and dist.get_rank(run.world.model_group) == 0:
            own = own | version_metrics(rollouts, trained_version, max_staleness)
        strengths = {"kl/beta": run.objective.beta, "mixture/lambda": run.objective.golden_weight}
        strengths["rollout/max_new_tokens"] = run.sampling.max_new_tokens
        metrics = metrics | Metrics({key: Same(value) for key, value in strengths.items()})
    for more in (reduce_over_ranks(own, object_group(dist.group.WORLD)), *reduced):
        metrics = metrics | more
    return metrics
