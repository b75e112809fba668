"""Refuse episodes of several contexts where a setting assumes one, when an environment has begun
another.
"""

from collections.abc import Sequence

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.samples import context_samples
from stable_opd_mcore.records import Rollout


def restart_problem(config: Config, rollouts: Sequence[Rollout]) -> str | None:
    """What is wrong with an episode of several contexts, for settings that assume one."""
    for rollout in rollouts:
        where, remedy = "its environment begins a new context", "the environment"
        first, second = (*context_samples(rollout), None, None)[:2]
        begun = first and second and second.token_ids[: len(first.token_ids) - 1].tolist()
        if first and begun == first.token_ids[:-1].tolist():
            where = (
                "the student ends a turn with another token than its chat template, whose token "
                "the next turn reads in a new context"
            )
            remedy = "the chat template end a turn as the student does, so as to"
        where = f"prompt {rollout.prompt.prompt_id}: {where}"
        discount = config.objectives[rollout.prompt.use.objective].discount
        if discount and any(turn.restarts for turn in rollout.turns[1:]):
            return (
                f"{where}, and objective.discount={discount:g} would add up the "
                "advantages of each context on its own, not of the episode; set "
                f"objective.discount=0, or let {remedy} only continue the context"
            )
        # A function replaces what the environment yielded first; a template, the row's prompt.
        is_function = config.teacher and config.teacher.prompt_function
        turns = rollout.turns[1:] if is_function else rollout.turns
        if config.teacher and config.teacher.prompt and any(turn.restarts for turn in turns):
            return (
                f"{where}, which does not begin with the prompt that teacher.prompt replaces; "
                f"remove teacher.prompt, or let {remedy} only continue the context"
            )
    return None
