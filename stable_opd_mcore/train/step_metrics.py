"""The metrics of one training step, reduced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from stable_opd_mcore.data.environment_names import turns_by_environment
from stable_opd_mcore.data.golden_prefix import prefix_metrics
from stable_opd_mcore.data.responses import rollout_metrics, version_metrics
from stable_opd_mcore.losses.token_weights import by_episode
from stable_opd_mcore.metrics import Metrics, Same, reduce_over_ranks
from stable_opd_mcore.monitoring.health import sample_metrics
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import World, object_group
from stable_opd_mcore.records import MicroBatch, Rollout
from stable_opd_mcore.sample_facts import SampleFacts
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.samples.overlap import overlap_is_due, overlap_metrics
from stable_opd_mcore.train.samples.sharing import Minibatch
from stable_opd_mcore.train.samples.source_metrics import source_metrics


def step_metrics(
    run: Run,
    rollouts: Sequence[Rollout],
    facts: SampleFacts,
    timer: PhaseTimer,
    trained_version: int,  # version of the weights that the step has updated
) -> Metrics:
    """The step's metrics that no update makes, the same on every rank."""
    own = timer.metrics(int(facts.tokens_B.sum())) | run.engine.take_metrics()
    if run.rollout_prompts is not None and dist.get_rank(run.world.model_group) == 0:
        own = own | run.rollout_prompts.take_metrics()
    episodes, _ = by_episode(facts)
    metrics = sample_metrics(episodes) | source_metrics(run.config, run.objective, episodes)
    if run.objective.needs_rollouts:
        own = own | measured(run, rollouts, run.sampling.max_new_tokens)
        if run.config.rollout.prefix.by and dist.get_rank(run.world.model_group) == 0:
            own = own | prefix_metrics(rollouts)
        max_staleness = run.config.rollout.max_staleness
        if max_staleness and dist.get_rank(run.world.model_group) == 0:
            own = own | version_metrics(rollouts, trained_version, max_staleness)
        settings = {
            "kl/beta": run.objective.beta,
            "mixture/lambda": run.objective.golden_weight,
            "rollout/max_new_tokens": run.sampling.max_new_tokens,
        }
        metrics = metrics | Metrics({key: Same(value) for key, value in settings.items()})
    return metrics | reduce_over_ranks(own, object_group(dist.group.WORLD))


def measured(
    run: Run, rollouts: Sequence[Rollout], max_new_tokens: int, area: str = "rollout"
) -> Metrics:
    """`<area>/*` of this data-parallel rank's rollouts; one rank of each replica has them."""
    if dist.get_rank(run.world.model_group):
        return Metrics()
    turns = turns_by_environment(run.config)
    return rollout_metrics(rollouts, max_new_tokens, area, turns)


def compare_models(
    run: Run,
    scored_batches: Sequence[Sequence[MicroBatch]],
    minibatches: Sequence[Minibatch],
    step: int,
) -> Metrics:
    """Every overlap.EVERY steps: metrics of the most probable tokens of both models."""
    metrics = Metrics()
    if run.overlap is None or not overlap_is_due(step):
        return metrics
    for micro_batches, minibatch in zip(scored_batches, minibatches, strict=True):
        row_metrics = overlap_metrics(run.overlap, micro_batches, minibatch.samples)
        metrics = metrics | reduce_row_metrics(run.world, row_metrics)
    return metrics


def reduce_row_metrics(world: World, metrics: Metrics) -> Metrics:
    """Add metrics of token rows over all ranks.

    All tensor-parallel ranks hold the same rows; only rank 0 contributes them.
    """
    own = metrics if world.tensor_rank == 0 else Metrics()
    return reduce_over_ranks(own, object_group(dist.group.WORLD))
