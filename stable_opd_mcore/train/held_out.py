"""Evaluation of the current weights on held-out prompts, during training.

The command `evaluate` (commands/evaluate) evaluates a finished model, and stores what it samples.
"""

import time
from collections.abc import Sequence

import torch.distributed as dist

from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.evaluation.results import (
    SAMPLES_PER_PART,
    evaluation_sampling,
    require_answers,
)
from stable_opd_mcore.metrics import Max, Metrics, reduce_over_ranks
from stable_opd_mcore.parallel.world import World, object_group
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.rollout.interaction import with_seeds
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.samples.collecting import graded, own_share
from stable_opd_mcore.train.samples.failed_episodes import refuse_failed
from stable_opd_mcore.train.step_metrics import measured


def evaluate_student(run: Run, state: TrainState) -> Metrics:
    """`eval/*` metrics of the current weights, and `eval_greedy/*` with evaluation.also_greedy.

    The run's own engine samples. The embedded engine's noise is the same at every step, so two of
    its evaluations differ only by the weights.
    """
    assert run.held_out is not None
    config = run.config
    prompts = run.held_out.select(range(len(run.held_out)))
    if config.reward.function is None:
        require_answers(prompts)
    run.memory.keep_only(*phases.ROLLOUT)
    engine = run.held_out_engine or run.engine
    engine.publish(state.weight_version)
    metrics, started = Metrics(), time.perf_counter()
    for area, greedy in (("eval", False), ("eval_greedy", True)):
        if greedy and not config.evaluation.also_greedy:
            continue
        sampling = evaluation_sampling(config, run.tokenizer.stop_token_ids, greedy=greedy)
        rollouts = [
            rollout
            for batch in parts_of(run.world, prompts, sampling)
            for rollout in sample_held_out(engine, run.grader, run.world, batch, sampling)
        ]
        metrics = metrics | measured(run, rollouts, sampling.max_new_tokens, area)
    seconds = Metrics({"time/eval": Max(time.perf_counter() - started)})
    return reduce_over_ranks(metrics | seconds, object_group(dist.group.WORLD))


def parts_of(world: World, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sequence[Prompt]]:
    """This rank's share of each part."""
    size = max(1, SAMPLES_PER_PART // sampling.num_samples)
    starts = range(0, len(prompts), size)
    return [own_share(world, prompts[start : start + size]) for start in starts]


def sample_held_out(
    engine: RolloutEngine,
    grader: Grader,
    world: World,
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> list[Rollout]:
    """Graded rollouts of this rank's share of a part."""
    rollouts = engine.generate(prompts, sampling, step=0)
    rollouts = graded(grader, world, prompts, rollouts, by_source=False)
    if engine.interaction is not None and engine.interaction.environments:
        refuse_failed(engine, rollouts, held_out=True)
    return with_seeds(rollouts, sampling, 0)
