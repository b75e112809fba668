"""Golden turns that begin an episode before the student's first turn: `rollout.prefix`.

They are said to the environment as if the student had sampled them, and its answers are what a
student reads between its own turns. All of it together is what the student observes first, so no
token of it is trained (rollout/interaction.py plays them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stable_opd_mcore.data.bridge import Observed
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.rollout.episodes import Episode

Decode = Callable[[Sequence[int]], str]


def with_golden_turn(episode: Episode, what: Observed, decode: Decode) -> Episode:
    """The episode after what it observed, and its next golden turn, whose text is the last turn's.

    episode: has only golden turns so far.
    """
    golden, lengths = episode.prompt.golden_token_ids, episode.prompt.golden_turn_tokens
    number = 2 * len(episode.turns)  # every other part is observed
    assert golden is not None
    start = sum(lengths[:number])
    ids = golden[start : start + lengths[number]]
    return episode.after(what).with_tokens(
        np.array(ids, np.int32),
        np.zeros(len(ids), np.float32),
        Ending.STOP,
        episode.segments[0].weight_version,
        text=decode(ids),
    )


def joined(played: Episode, what: Observed, decode: Decode) -> Observed:
    """What the student observes before its own first turn: all that was played, and what followed.

    Where the environment began a new context meanwhile, only what stands in it.
    """
    whole, messages, restarts = played.after(what), list[Message](), False
    for number, turn in enumerate(whole.turns):
        restarts = restarts or turn.restarts
        if turn.restarts:
            messages = list(turn.messages)
        else:
            messages += turn.messages if number or turn.messages else whole.prompt.messages
        if number < len(played.turns):
            messages.append({"role": "assistant", "content": turn.text})
    start = 0 if restarts else len(whole.prompt.token_ids)
    ids: tuple[int, ...] = tuple(whole.context[start:].tolist())
    own = {"token_ids": ids, "text": decode(ids), "messages": tuple(messages)}
    return replace(what, **own, restarts=restarts)
