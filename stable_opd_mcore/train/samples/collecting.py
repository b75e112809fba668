"""Collect the samples of a step on one rank: rollouts of its prompts, graded, and golden solutions.

A step trains on the next `rollout.prompts_per_step` slots of the data order, counted over the run.
The data-parallel ranks take slots in turn. The functions below come in the order in which
`collect_samples` calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from stable_opd_mcore.data.golden_prefix import with_prefix
from stable_opd_mcore.data.samples import (
    golden_samples,
    mark_off_policy,
    off_policy_slots,
    rollout_samples,
)
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import World, broadcast_object, gather_objects
from stable_opd_mcore.records import Prompt, Rollout, Sample
from stable_opd_mcore.rollout.interaction import with_seeds
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.samples.failed_episodes import refuse_episodes
from stable_opd_mcore.train.samples.served_scores import begin_scoring

Item = TypeVar("Item")


def collect_samples(
    run: Run, state: TrainState, timer: PhaseTimer
) -> tuple[list[Rollout], list[Sample]]:
    """This rank's rollouts for the step after `state`, and its samples: rollouts, then golden
    solutions, with a served teacher's scores. Collective over all ranks.
    """
    prefetch_rollouts(run, state)
    prompts = own_prompts(run, state)
    golden = samples_of_golden(run, prompts, state)
    wait_for_golden = begin_scoring(run, golden, state.step)  # while the engine samples
    rollouts = sample_rollouts(run, prompts, state.step, timer)
    rollouts = with_teacher_prompts(run, rollouts)
    samples = samples_of_rollouts(run, rollouts, state)
    wait_for_rollouts = begin_scoring(run, samples, state.step)
    return rollouts, wait_for_rollouts() + wait_for_golden()


def prefetch_rollouts(run: Run, state: TrainState) -> None:
    """Ask the engine for the step's rollouts and those of the next steps, as many as
    rollout.max_staleness allows; without it, do nothing.
    """
    max_staleness = run.config.rollout.max_staleness
    if not (max_staleness and run.objective.needs_rollouts):
        return
    steps_left = run.config.train.steps - state.step
    for ahead in range(min(1 + max_staleness, steps_left)):
        step = state.step + ahead
        budget = run.config.sampling.budget(step)
        run.engine.prefetch(
            prompts_to_sample(run, own_prompts(run, state, ahead), step),
            replace(run.sampling, max_new_tokens=budget, training_step=step),
            step=step,
            weight_version=state.weight_version + ahead,
        )


def own_share(world: World, items: Sequence[Item]) -> Sequence[Item]:
    """This data-parallel rank's part of one item per prompt: every n-th."""
    return items[world.data_rank :: world.data_size]


def own_prompts(run: Run, state: TrainState, ahead: int = 0) -> list[Prompt]:
    """This data-parallel rank's prompts of the step after `state`, or of one `ahead` of it."""
    size = run.config.rollout.prompts_per_step
    first = state.cursor + ahead * size
    slots = own_share(run.world, range(first, first + size))
    rows = own_share(run.world, run.order.indices(first, size))
    prompts = run.prompts.select(rows)
    return [replace(prompt, slot=slot) for prompt, slot in zip(prompts, slots, strict=True)]


def samples_of_golden(run: Run, prompts: Sequence[Prompt], state: TrainState) -> list[Sample]:
    """The golden solutions of those prompts whose objective trains on them."""
    each = run.objective.each
    trained = [prompt for prompt in prompts if each[prompt.use.objective].needs_golden]
    return mark_samples(run, golden_samples(trained), state)


def mark_samples(run: Run, samples: list[Sample], state: TrainState) -> list[Sample]:
    """The samples, those of some prompts marked as off-policy (gkd)."""
    fraction = run.config.objectives[0].on_policy_fraction  # of several each has 1
    if fraction == 1:
        return samples
    count, seed = run.config.rollout.prompts_per_step, run.config.train.seed
    return mark_off_policy(samples, off_policy_slots(state.cursor, count, fraction, seed))


def sample_rollouts(
    run: Run, prompts: Sequence[Prompt], step: int, timer: PhaseTimer
) -> list[Rollout]:
    """Graded rollouts of this rank's prompts, without those whose objective trains on golden
    solutions only. `step` counts the finished steps.
    """
    if not run.objective.needs_rollouts:
        return []
    prompts = prompts_to_sample(run, prompts, step)
    with timer.part("wait") if run.config.rollout.has_servers else nullcontext():
        rollouts = run.engine.generate(prompts, run.sampling, step=step)
    rollouts = with_seeds(graded(run.grader, run.world, prompts, rollouts), run.sampling, step)
    refuse_episodes(run, rollouts)
    return rollouts


def prompts_to_sample(run: Run, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
    """Those that rollouts are sampled for, with the turns that begin them (rollout.prefix)."""
    config, windows = run.config, [run.prompts.window]
    if run.prompts.teacher is not None and run.prompts.teacher.window is not None:
        windows.append(run.prompts.teacher.window)

    def room(prompt: Prompt) -> int:
        longest = max(len(prompt.token_ids), len(prompt.teacher_token_ids or ()))
        return min(windows) - longest - (prompt.max_new_tokens or config.longest_turn)

    settings, seed = config.rollout.prefix, config.train.seed
    return [
        with_prefix(prompt, settings, step=step, seed=seed, room=room(prompt))
        for prompt in prompts
        if prompt.use.is_sampled
    ]


def graded(
    grader: Grader,
    world: World,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    by_source: bool = True,
) -> list[Rollout]:
    """This data-parallel rank's rollouts with rewards. Collective over the replica's ranks."""
    own = {prompt.prompt_id: prompt for prompt in prompts}  # a stored rollout's lacks fields
    rollouts = [replace(rollout, prompt=own[rollout.prompt.prompt_id]) for rollout in rollouts]
    # Grade on one rank and broadcast, so that a timeout cannot give ranks different rewards.
    if dist.get_rank(world.model_group) == 0:
        rollouts = grader.grade_rollouts(rollouts, by_source)
    judged = [(each.reward, each.grading_failure, each.feedback) for each in rollouts]
    verdicts = broadcast_object(judged, world.model_group)
    return [
        replace(rollout, reward=reward, grading_failure=failure, feedback=feedback)
        for rollout, (reward, failure, feedback) in zip(rollouts, verdicts, strict=True)
    ]


def with_teacher_prompts(run: Run, rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts, each with the prompt that `teacher.prompt.function` makes of it for the
    teacher. A rollout for which it makes none is not scored by a teacher. Collective.

    Raises:
        UserError: on all ranks, if it fails for more than half of a step's rollouts.
    """
    if run.rollout_prompts is None:
        return rollouts
    is_first = dist.get_rank(run.world.model_group) == 0
    made = run.rollout_prompts.of(rollouts) if is_first else []
    made = broadcast_object(made, run.world.model_group)
    failures = [each.failure for each in made if each is not None and each.failure is not None]
    counts = gather_objects((sum(each is not None for each in made), failures))
    total, failed = sum(count for count, _ in counts), [why for _, each in counts for why in each]
    if 2 * len(failed) > total:
        raise UserError(
            f"teacher.prompt.function failed for {len(failed)} of {total} rollouts; the first one: "
            f"{failed[0]}; correct it, and start the command again"
        )
    return [
        replace(rollout, prompt=_with_teacher_prompt(rollout.prompt, each and each.token_ids))
        for rollout, each in zip(rollouts, made, strict=True)
    ]


def _with_teacher_prompt(prompt: Prompt, token_ids: tuple[int, ...] | None) -> Prompt:
    use = replace(prompt.use, is_taught=token_ids is not None)
    return replace(prompt, teacher_token_ids=token_ids, use=use)


def samples_of_rollouts(run: Run, rollouts: Sequence[Rollout], state: TrainState) -> list[Sample]:
    """One sample for each context, with the token masks of its objective.

    Where no teacher scores a rollout, and its objective has no policy term without one, no token of
    it is trained. The KL to the reference stays, as with other masks.
    """
    masks = [each.masks for each in run.config.objectives]
    samples = [
        sample
        if sample.is_taught or run.objective.each[sample.objective].trains_untaught
        else replace(sample, trained=np.zeros_like(sample.trained))
        for sample in rollout_samples(rollouts, masks, run.sampling.max_new_tokens)
    ]
    return mark_samples(run, samples, state)
