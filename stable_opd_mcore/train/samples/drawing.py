"""Draw and grade the rollouts of this data-parallel rank's prompts, and make samples of them.

A step trains on the next `rollout.prompts_per_step` places of the data order, counted over the run.
The data-parallel ranks take them in turn.

Not here: the engines (rollout/), which rank trains on which sample (sharing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from stable_opd_mcore.data.golden import (
    golden_samples,
    mark_off_policy,
    off_policy_draws,
    rollout_samples,
)
from stable_opd_mcore.data.responses import rollout_metrics
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.parallel.world import World, broadcast_object
from stable_opd_mcore.records import Prompt, Rollout, Sample, Sampling
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run

Item = TypeVar("Item")
NOT_TIMED = nullcontext()


def own_share(world: World, items: Sequence[Item]) -> Sequence[Item]:
    """Of one item per prompt, those that this data-parallel rank works on: every n-th."""
    return items[world.data_rank :: world.data_size]


def rows_of_step(run: Run, state: TrainState, ahead: int = 0) -> list[int]:
    """The rows of the data, of all ranks, for the step after `state` or for one `ahead` of it."""
    size = run.config.rollout.prompts_per_step
    return run.order.indices(state.cursor + ahead * size, size)


def own_prompts(run: Run, rows: Sequence[int]) -> list[Prompt]:
    """This data-parallel rank's prompts among the rows of a step."""
    return run.prompts.select(own_share(run.world, rows))


def draw_rollouts(
    run: Run,
    prompts: Sequence[Prompt],
    step: int,
    drawing: AbstractContextManager[object] = NOT_TIMED,
) -> list[Rollout]:
    """Graded rollouts of this rank's prompts; none where the objective trains on golden solutions
    only.

    Args:
        step: finished steps.
        drawing: entered while the engine draws.
    """
    if not run.objective.needs_rollouts:
        return []
    with drawing:
        rollouts = run.engine.generate(prompts, run.sampling, step=step)
    return graded(run.grader, run.world, prompts, rollouts)


def draw_graded(
    engine: RolloutEngine,
    grader: Grader,
    world: World,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    step: int,
) -> list[Rollout]:
    """Rollouts of this data-parallel rank's held-out prompts with rewards, in the order of the
    prompts.
    """
    rollouts = engine.generate(prompts, sampling, step=step)
    return graded(grader, world, prompts, rollouts, by_source=False)


def graded(
    grader: Grader,
    world: World,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    by_source: bool = True,
) -> list[Rollout]:
    """This data-parallel rank's rollouts with rewards. Collective over the replica's ranks.

    Args:
        by_source: as of `Grader.grade_rollouts`.
    """
    own = {prompt.prompt_id: prompt for prompt in prompts}  # those of stored rollouts lack columns
    rollouts = [replace(rollout, prompt=own[rollout.prompt.prompt_id]) for rollout in rollouts]
    # Grade on one rank and broadcast, so that a timeout cannot give ranks different rewards.
    if dist.get_rank(world.model_group) == 0:
        rollouts = grader.grade_rollouts(rollouts, by_source)
    verdicts = broadcast_object(
        [(rollout.reward, rollout.grading_failure) for rollout in rollouts], world.model_group
    )
    return [
        replace(rollout, reward=reward, grading_failure=failure)
        for rollout, (reward, failure) in zip(rollouts, verdicts, strict=True)
    ]


def prefetch_rollouts(run: Run, state: TrainState) -> None:
    """Draw the step's rollouts, if they are not drawn yet, and then those of later steps ahead, or
    continue with them; nothing without rollout.max_staleness.
    """
    max_staleness = run.config.rollout.max_staleness
    if not (max_staleness and run.objective.needs_rollouts):
        return
    steps_left = run.config.train.steps - state.step
    for ahead in range(min(1 + max_staleness, steps_left)):
        step = state.step + ahead
        run.engine.prefetch(
            own_prompts(run, rows_of_step(run, state, ahead)),
            replace(run.sampling, max_new_tokens=run.config.sampling.budget(step)),
            step=step,
            weight_version=state.weight_version + ahead,
        )


def rollouts_as_samples(
    run: Run,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    cursor: int,
) -> list[Sample]:
    """This rank's rollouts as they are trained on.

    Args:
        prompts: of this rank.
        cursor: prompts that earlier steps trained on.
    """
    masks = run.config.objective.masks
    samples = rollout_samples(rollouts, masks, run.sampling.max_new_tokens)
    return _with_marks(run, with_teacher_prompts(samples, prompts), cursor)


def golden_solutions(run: Run, prompts: Sequence[Prompt], cursor: int) -> list[Sample]:
    """The golden solutions of this rank's prompts where the objective trains on them.

    Args: as of `rollouts_as_samples`.
    """
    samples = golden_samples(prompts) if run.objective.needs_golden else []
    return _with_marks(run, with_teacher_prompts(samples, prompts), cursor)


def _with_marks(run: Run, samples: list[Sample], cursor: int) -> list[Sample]:
    """Samples of one source, those of some prompts marked as off-policy (gkd)."""
    fraction = run.config.objective.on_policy_fraction
    if fraction == 1:
        return samples
    count, seed = run.config.rollout.prompts_per_step, run.config.train.seed
    marks = off_policy_draws(cursor, count, fraction, seed)
    return mark_off_policy(samples, own_share(run.world, marks))


def with_teacher_prompts(samples: list[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
    """The samples with `teacher.prompt` of their prompts; as they are where there is none.

    Not from a rollout's own prompt: one that was read from a file lacks it.
    """
    own = {prompt.prompt_id: prompt.teacher_token_ids for prompt in prompts}
    if all(token_ids is None for token_ids in own.values()):
        return samples
    return [replace(one, teacher_prompt_token_ids=own[one.prompt_id]) for one in samples]


def measured(
    run: Run, rollouts: Sequence[Rollout], max_new_tokens: int, area: str = "rollout"
) -> Metrics:
    """`<area>/*` of this data-parallel rank's rollouts; one rank of each replica has them."""
    if dist.get_rank(run.world.model_group):
        return Metrics()
    return rollout_metrics(rollouts, max_new_tokens, area)
