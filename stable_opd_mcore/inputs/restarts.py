"""Refuse episodes of several contexts where a setting assumes one, when an environment has begun
another.
"""

from collections.abc import Sequence

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.samples import context_samples
from stable_opd_mcore.records import Rollout


def restart_problem(config: Config, rollouts: Sequence[Rollout]) -> str | None:
    """What is wrong with an episode of several contexts, for settings that assume one."""
    objectives, teacher = config.objectives, config.teacher
    for rollout in rollouts:
        discount = objectives[rollout.prompt.use.objective].discount
        if discount and any(turn.restarts for turn in rollout.turns[1:]):
            where, remedy = _cause(rollout)
            return (
                f"{where}, and objective.discount={discount:g} would add up the "
                "advantages of each context on its own, not of the episode; set "
                f"objective.discount=0, or let {remedy} only continue the context"
            )
        # A function replaces what the environment yielded first; a template, the row's prompt.
        turns = rollout.turns[1:] if teacher and teacher.prompt_function else rollout.turns
        if teacher and teacher.prompt and any(turn.restarts for turn in turns):
            where, remedy = _cause(rollout)
            return (
                f"{where}, which does not begin with the prompt that teacher.prompt replaces; "
                f"remove teacher.prompt, or let {remedy} only continue the context"
            )
    return None


def _cause(rollout: Rollout) -> tuple[str, str]:
    """Why an episode has several contexts, and what is to change."""
    where, remedy = "its environment begins a new context", "the environment"
    first, second = (*context_samples(rollout), None, None)[:2]
    begun = first and second and second.token_ids[: len(first.token_ids) - 1].tolist()
    if first and begun == first.token_ids[:-1].tolist():
        where = (
            "the student ends a turn with another token than its chat template, whose token "
            "the next turn reads in a new context"
        )
        remedy = "the chat template end a turn as the student does, so as to"
    return f"prompt {rollout.prompt.prompt_id}: {where}", remedy
