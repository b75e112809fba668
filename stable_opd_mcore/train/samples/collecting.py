"""Collect the samples of a step on one rank: rollouts of its prompts, graded, and golden solutions.

A step trains on the next `rollout.prompts_per_step` slots of the data order, counted over the run.
The data-parallel ranks take slots in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from stable_opd_mcore.data.environment_names import turns_by_environment
from stable_opd_mcore.data.golden_prefix import with_prefix
from stable_opd_mcore.data.responses import rollout_metrics
from stable_opd_mcore.data.samples import (
    golden_samples,
    mark_off_policy,
    off_policy_slots,
    rollout_samples,
)
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.inputs.restarts import restart_problem
from stable_opd_mcore.losses.objectives import Objective
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import World, broadcast_object, gather_objects
from stable_opd_mcore.records import Prompt, Rollout, Sample, Sampling
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.rollout.interaction import with_seeds
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
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
    solutions = golden_samples([each for each in prompts if _objective(run, each).needs_golden])
    golden = mark_samples(run, solutions, state)
    wait_for_golden = begin_scoring(run, golden, state.step)  # while the engine samples
    rollouts = with_teacher_prompts(run, sample_rollouts(run, prompts, state.step, timer))
    masks = [each.masks for each in run.config.objectives]
    max_new_tokens = run.sampling.max_new_tokens
    of_rollouts = without_teacher_terms(run, rollout_samples(rollouts, masks, max_new_tokens))
    samples = mark_samples(run, of_rollouts, state)
    wait_for_rollouts = begin_scoring(run, samples, state.step)
    return rollouts, wait_for_rollouts() + wait_for_golden()


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


def prompts_to_sample(run: Run, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
    """Those that rollouts are sampled for, with the turns that begin them (rollout.prefix)."""
    config, most = run.config, run.config.longest_turn
    windows = [run.prompts.window]
    if run.prompts.teacher is not None and run.prompts.teacher.window is not None:
        windows.append(run.prompts.teacher.window)
    return [
        with_prefix(
            prompt,
            config.rollout.prefix,
            step=step,
            seed=config.train.seed,
            room=min(windows)
            - max(len(prompt.token_ids), len(prompt.teacher_token_ids or ()))
            - (prompt.max_new_tokens or most),
        )
        for prompt in prompts
        if prompt.use.is_sampled
    ]


def _objective(run: Run, prompt: Prompt) -> Objective:
    return run.objective.each[prompt.use.objective]


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


def with_teacher_prompts(run: Run, rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts, each with the prompt that `teacher.prompt.function` makes of it; no teacher
    scores one for which it makes none. Collective.

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


def without_teacher_terms(run: Run, samples: Sequence[Sample]) -> list[Sample]:
    """The samples, in which nothing is trained where no teacher scores a rollout, and its objective
    has no policy term without one. The KL to the reference stays, as with other masks."""
    return [
        sample
        if sample.is_taught or run.objective.each[sample.objective].trains_untaught
        else replace(sample, trained=np.zeros_like(sample.trained))
        for sample in samples
    ]


def refuse_episodes(run: Run, rollouts: Sequence[Rollout]) -> None:
    """End a run on all ranks if more than half of a step's episodes failed in their environment, a
    chat template cannot write a message, or an episode has several contexts where a setting assumes
    one. Collective.
    """
    if not run.config.has_environment:
        return
    _refuse(run.engine, rollouts, restart_problem(run.config, rollouts))


def _refuse(
    engine: RolloutEngine,
    rollouts: Sequence[Rollout],
    problem: str | None = None,
    held_out: bool = False,
) -> None:
    """Raise a UserError on all ranks if more than half of the episodes failed in their environment,
    or one of them has a problem. Collective."""
    played = [each for each in rollouts if each.prompt.environment is not None]
    rows = [each.prompt.prompt_id for each in played if each.grading_failure is not None]
    own = len(played), rows, engine.first_failure, engine.refusal or problem
    counts, failed, reasons, problems = zip(*gather_objects(own), strict=True)
    rows = [row for each in failed for row in each]
    if len(rows) > sum(counts) / 2:
        reason = next((each for each in reasons if each), "see the log")
        which = " of held-out rows, which the environment plays too," if held_out else ""
        remedy = ", give these rows the columns that it reads, or set data.eval=null"
        raise UserError(
            f"{len(rows)} of {sum(counts)} episodes{which} failed in their environment, that of "
            f"row {rows[0]} among them; the first one: {reason}; correct it"
            f"{remedy if held_out else ''}, and start the command again"
        )
    for found in filter(None, problems):
        raise UserError(found)


def sample_held_out(
    engine: RolloutEngine,
    grader: Grader,
    world: World,
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> list[Rollout]:
    rollouts = engine.generate(prompts, sampling, step=0)
    rollouts = graded(grader, world, prompts, rollouts, by_source=False)
    if engine.interaction is not None and engine.interaction.environments:
        _refuse(engine, rollouts, held_out=True)
    return with_seeds(rollouts, sampling, 0)


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


def mark_samples(run: Run, samples: list[Sample], state: TrainState) -> list[Sample]:
    """The samples, those of some prompts marked as off-policy (gkd)."""
    fraction = run.config.objectives[0].on_policy_fraction  # of several each has 1
    if fraction == 1:
        return samples
    count, seed = run.config.rollout.prompts_per_step, run.config.train.seed
    return mark_off_policy(samples, off_policy_slots(state.cursor, count, fraction, seed))


def measured(
    run: Run, rollouts: Sequence[Rollout], max_new_tokens: int, area: str = "rollout"
) -> Metrics:
    """`<area>/*` of this data-parallel rank's rollouts; one rank of each replica has them."""
    if dist.get_rank(run.world.model_group):
        return Metrics()
    turns = turns_by_environment(run.config)
    return rollout_metrics(rollouts, max_new_tokens, area, turns)
