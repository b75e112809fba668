"""One training step of on-policy distillation. Start reading here.

The student samples responses, teacher and reference score them, the student is updated, and the
rollout engine receives its new weights. The code is the same for every parallel layout: each
data-parallel rank samples for its share of the prompts. Then every rank knows lengths and rewards
of all samples, but tokens only of those that it trains on (train/samples/sharing.py). Token weights
follow from these facts and contain the global normalisers, so the loss is a plain sum over tokens,
micro-batches and ranks.

Not here: how rollouts are collected (train/samples/collecting.py); one update (train/update.py);
the loop around the step, evaluation, checkpoints, files (loop.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.packing import costs
from stable_opd_mcore.losses.token_weights import correct_importance, use_rollout_policy
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.records import MicroBatch, Rollout, Sample
from stable_opd_mcore.sample_facts import SampleFacts
from stable_opd_mcore.scoring.scorer import with_scores
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.learning_rate import learning_rate
from stable_opd_mcore.train.loss_weights import adapt, loss_weights_of
from stable_opd_mcore.train.oversight.guard import Action, decide
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.samples.collecting import collect_samples
from stable_opd_mcore.train.samples.sharing import (
    Minibatch,
    gather_facts,
    pack_micro_batches,
    share_out,
)
from stable_opd_mcore.train.samples.token_values import RolloutValues, TokenRecorder
from stable_opd_mcore.train.step_metrics import compare_models, reduce_row_metrics, step_metrics
from stable_opd_mcore.train.update import update_once


@dataclass(frozen=True)
class StepResult:
    state: TrainState
    metrics: Metrics  # global: the same on every rank
    rollouts: Sequence[Rollout]  # this data-parallel rank's, in the order of its prompts
    actions: Sequence[Action]  # the guard's after the step
    token_values: Sequence[RolloutValues]  # the first rollouts, for readers; on rank 0 only


def train_step(run: Run, state: TrainState) -> StepResult:
    """Sample from the student, score with teacher and reference, update the student, publish its
    weights.

    Raises:
        UserError: the loss or the gradient norm is not finite.
        EngineLost, TeacherLost: no server answers; no weight has changed.
    """
    timer = PhaseTimer(run.world.device, run.phase, run.idle_clocks)
    step_run = at_step(run, state)

    with timer.phase("rollout"):
        run.memory.keep_only(*phases.ROLLOUT)
        rollouts, samples = collect_samples(step_run, state, timer)
        facts = facts_of_step(step_run, samples)
        minibatches = minibatches_of(step_run, samples, facts)

    with timer.phase("score"):
        run.memory.hold(*phases.SCORE)
        scored_batches, score_metrics = score(step_run, minibatches, state.step + 1)

    with timer.phase("update"):
        run.memory.hold(*phases.UPDATE)
        recorder = TokenRecorder(run.config, facts)
        update_metrics = update(step_run, minibatches, scored_batches, state.step, recorder)
    del scored_batches  # a publish gathers whole tensors in the memory of the scores

    num_prompts = run.config.rollout.prompts_per_step
    new_state = state.advance(prompts=num_prompts, optimizer_steps=len(minibatches))
    for moving_weights in run.moving.values():
        moving_weights.follow(new_state.step, run.memory)
    with timer.phase("sync"):
        run.engine.publish(new_state.weight_version)

    metrics = step_metrics(step_run, rollouts, facts, timer, state.weight_version)
    metrics = metrics | score_metrics | update_metrics
    new_state, actions = adapted_and_guarded(run.config, new_state, metrics)
    token_values = recorder.gather(run.world, rollouts)
    return StepResult(new_state, metrics, rollouts, actions, token_values)


def at_step(run: Run, state: TrainState) -> Run:
    """The run with the beta, lambda and length budget of the step after `state`."""
    now = loss_weights_of(run.config, state.adapted, state.guard)
    objective = run.objective.with_loss_weights(now.beta, now.lambda_)
    reference = None if objective.reference_needs == "none" else run.reference
    budget = run.config.sampling.budget(state.step)
    sampling = replace(run.sampling, max_new_tokens=budget, training_step=state.step)
    return replace(run, objective=objective, reference=reference, sampling=sampling)


def facts_of_step(run: Run, samples: Sequence[Sample]) -> SampleFacts:
    """What every rank knows of all ranks' samples. Collective over the data-parallel ranks."""
    facts = gather_facts(run.world, samples)
    return replace(facts, source_B=run.order.sources(facts.slot_B))


def minibatches_of(run: Run, samples: Sequence[Sample], facts: SampleFacts) -> list[Minibatch]:
    """What this rank trains on in each minibatch, from the samples of all ranks."""
    world, length = run.world, run.student.chunks[0].architecture.attention_length
    return share_out(
        world,
        samples,
        facts,
        run.config.train.minibatches,
        run.objective.sample_weights,
        lambda tokens_B: costs(tokens_B, length, world.sequence_multiple),
        prompts_together=run.config.train.share_prefixes,
    )


def score(
    run: Run, minibatches: Sequence[Minibatch], step: int
) -> tuple[Sequence[Sequence[MicroBatch]], Metrics]:
    """The micro-batches of each minibatch, with the scores of teacher, reference and behaviour
    policy; and the metrics that compare the models.
    """
    scored_batches = [
        with_scores(
            pack_minibatch(run, minibatch),
            minibatch.samples,
            teacher=run.teacher,
            reference=run.reference,
            behaviour=run.behaviour,
        )
        for minibatch in minibatches
    ]
    overlap = compare_models(run, scored_batches, minibatches, step)
    corrected_batches, correction = correct_mismatch(run, scored_batches)
    return corrected_batches, overlap | correction


def pack_minibatch(run: Run, minibatch: Minibatch) -> list[MicroBatch]:
    """This rank's micro-batches of a minibatch on its device, sliced under context parallelism."""
    architecture = run.student.chunks[0].architecture
    experts = architecture.experts if run.config.rollout.routing_replay else None
    return pack_micro_batches(
        run.config,
        run.world,
        minibatch.samples,
        minibatch.weights,
        attention_length=architecture.attention_length,
        routing=experts and (architecture.num_layers, experts.per_token),
    )


def correct_mismatch(
    run: Run, scored_batches: Sequence[Sequence[MicroBatch]]
) -> tuple[Sequence[Sequence[MicroBatch]], Metrics]:
    """Account for rollouts whose engine had probabilities that differ from the student's now.

    rollout.importance_correction multiplies their token weights. Without it, stale rollouts
    (rollout.max_staleness) use the engine's log-probabilities as the old policy's.
    """
    settings = run.config.rollout
    if settings.importance_correction == "none":
        if settings.max_staleness:
            scored_batches = [use_rollout_policy(batches) for batches in scored_batches]
        return scored_batches, Metrics()
    corrected_batches: list[Sequence[MicroBatch]] = []
    metrics = Metrics()
    for micro_batches in scored_batches:
        corrected, batch_metrics = correct_importance(
            micro_batches,
            settings.importance_correction,
            settings.importance_threshold,
            sampled_kl=run.config.kl.estimator != "exact",
        )
        corrected_batches.append(corrected)
        metrics = metrics | batch_metrics
    return corrected_batches, reduce_row_metrics(run.world, metrics)


def update(
    run: Run,
    minibatches: Sequence[Minibatch],
    scored_batches: Sequence[Sequence[MicroBatch]],
    finished_steps: int,
    recorder: TokenRecorder,
) -> Metrics:
    """One optimizer step for each minibatch; returns metrics, the same on every rank."""
    lr = learning_rate(finished_steps, run.config.train.steps, run.config.optimizer)
    metrics = Metrics()
    for minibatch, micro_batches in zip(minibatches, scored_batches, strict=True):
        step = finished_steps + 1
        outputs, update_metrics = update_once(run, micro_batches, lr, step, minibatch.source_B)
        recorder.record(minibatch, micro_batches, outputs)
        metrics = metrics | update_metrics
    return metrics


def adapted_and_guarded(
    config: Config, state: TrainState, metrics: Metrics
) -> tuple[TrainState, Sequence[Action]]:
    """The state with adapted weights and the guard's decision after the step, and its actions.

    While the length budget or the number of turns grows, the guard rests: a low limit truncates by
    design.
    """
    values, every = metrics.values_by_key(), config.checkpoint.every
    state = replace(state, adapted=adapt(config, state.adapted, values))
    if _horizon_grows(config, state.step - 1):
        return state, ()
    saved = bool(every) and state.step % every == 0
    guard, actions = decide(config.guard, state.guard, state.step, values, saved)
    return replace(state, guard=guard), actions


def _horizon_grows(config: Config, step: int) -> bool:
    """Whether later steps allow longer responses or episodes than the one after `step` steps."""
    return any(
        config.sampling.budget(step, config.budget_of(source)) < config.budget_of(source)
        or environment.turns_at(step) < environment.max_turns
        for source in config.data.sources
        for environment in [config.environment_of(source)]
    )
