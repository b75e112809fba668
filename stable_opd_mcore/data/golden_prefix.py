"""Rollouts that begin with turns of others: `rollout.prefix` (docs/prefixes.md).

Golden turns without an environment, and what was observed between them, are a part of the prompt:
the student reads them and samples one turn. With an environment the turns are only counted here;
they are said to it, and it answers them (rollout/played_turns.py).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stable_opd_mcore.config.prefix_settings import PrefixConfig
from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.records import Prompt, Rollout


def with_prefix(
    prompt: Prompt, settings: PrefixConfig, *, step: int, seed: int, room: int
) -> Prompt:
    """The prompt of a slot with the turns that begin it; unchanged where none do.

    The number of turns is a function of seed and slot, so all samples begin alike, and a run that
    resumes continues alike.

    Args:
        step: the finished steps, on which the number of turns may depend.
        room: the most tokens that the turns and what is observed may have; fewer turns are taken.
    """
    if settings.by is None or not prompt.use.is_sampled:
        return prompt
    # Tokens of turns and observations, one after the other; a teacher's turns are not known yet.
    lengths = prompt.golden_turn_tokens if settings.by == "golden" else ()
    available = len(lengths) // 2
    if settings.by == "teacher" and prompt.environment is not None:
        available = settings.last or 0
    fewest, most = settings.range_at(step, available)
    chosen = random.Random(f"prefix/{seed}/{prompt.slot}")
    is_chosen, turns = chosen.random() < settings.share, chosen.randint(fewest, most)
    while turns and sum(lengths[: 2 * turns]) > room:
        turns -= 1
    if not is_chosen or not turns:
        return prompt
    if prompt.environment is not None:
        return replace(prompt, num_played=turns)
    assert prompt.golden_token_ids is not None
    played = prompt.golden_token_ids[: sum(lengths[: 2 * turns])]
    of_teacher = prompt.teacher_token_ids
    return replace(
        prompt,
        token_ids=prompt.token_ids + played,
        teacher_token_ids=None if of_teacher is None else of_teacher + played,
        messages=_messages(prompt, turns),
        num_played=turns,
    )


def prefix_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """How many of these rollouts began with turns of others, and what those were worth."""
    begun = [rollout for rollout in rollouts if rollout.prompt.num_played]
    graded = [rollout.reward for rollout in begun if rollout.reward is not None]
    turns = sum(rollout.prompt.num_played for rollout in begun)
    return Metrics(
        {
            "rollout/prefix_share": Mean(len(begun), len(rollouts)),
            "rollout/prefix_turns_mean": Mean(turns, len(begun)),
            "rollout/prefix_accuracy": Mean(sum(graded), len(graded)),
        }
    )


def _messages(prompt: Prompt, turns: int) -> list[Mapping[str, Any]]:
    """The messages of the prompt, and those of its first golden turns up to the next one."""
    found = list(prompt.messages)
    for message in prompt.golden_messages:
        turns -= message["role"] == "assistant"
        if turns < 0:
            break
        found.append(message)
    return found
