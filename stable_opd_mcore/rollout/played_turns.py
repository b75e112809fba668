"""Turns that begin an episode before the student's first turn: `rollout.prefix`.

They are golden turns, or sampled by a served teacher. They are said to the environment as if the
student had sampled them, and its answers are what a student reads between its own turns. All of it
together is what the student observes first, so no token of it is trained (rollout/interaction.py
plays them).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from stable_opd_mcore.config.rollouts import MAX_STALENESS
from stable_opd_mcore.data.bridge import Observed
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.serving.requests import Completion
from stable_opd_mcore.serving.teacher import ServedTeacher

_KEPT_STEPS = 2 * MAX_STALENESS  # an episode that begins anew gets the turns that it had
Decode = Callable[[Sequence[int]], str]


class PlayedTurn(NamedTuple):
    """A turn that the student has not sampled."""

    token_ids: tuple[int, ...]
    ending: Ending = Ending.STOP


def golden_turn(prompt: Prompt, number: int) -> PlayedTurn:
    """The golden turn of a prompt with this number, from 0."""
    golden, lengths = prompt.golden_token_ids, prompt.golden_turn_tokens
    assert golden is not None
    start = sum(lengths[: 2 * number])  # every other part is observed
    return PlayedTurn(golden[start : start + lengths[2 * number]])


@dataclass(eq=False)
class TeacherTurns:
    """The turns of a served teacher. All samples of a prompt get the same ones.

    Args:
        stop_ids: the student's, of which the first ends every finished turn.
    """

    teacher: ServedTeacher
    stop_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[tuple[int, str, int], Future[PlayedTurn]] = {}  # by step, prompt, turn

    def ask(self, episode: Episode, sampling: Sampling, step: int) -> Future[PlayedTurn]:
        """The teacher's next turn in the episode, whose last turn is open. From any thread."""
        prompt = episode.prompt
        key = step, prompt.prompt_id, len(episode.turns)
        with self._lock:
            if key in self._asked:
                return self._asked[key]
            self._asked = {k: each for k, each in self._asked.items() if k[0] >= step - _KEPT_STEPS}
            turn = self._asked[key] = Future[PlayedTurn]()
        most = episode.limit(sampling)
        stops = tuple(dict.fromkeys((*self.stop_ids, *self.teacher.stop_ids)))
        settings = replace(sampling, max_new_tokens=most, num_samples=1, stop_token_ids=stops)
        sent = self.teacher.play(prompt.prompt_id, episode.context.tolist(), settings)
        sent.add_done_callback(partial(self._receive, turn, stops))
        return turn

    def _receive(
        self, turn: Future[PlayedTurn], stops: Sequence[int], sent: Future[Completion]
    ) -> None:
        try:
            ids = tuple(sent.result().token_ids.tolist())
            stopped = bool(ids) and ids[-1] in stops
            if stopped:
                ids = (*ids[:-1], self.stop_ids[0])
            turn.set_result(PlayedTurn(ids, Ending.STOP if stopped else Ending.LENGTH))
        except BaseException as error:  # raised again where the turn is waited for
            turn.set_exception(error)


def with_turn(episode: Episode, turn: PlayedTurn, decode: Decode) -> Episode:
    """The episode, whose last turn is open, with this turn; its text is that turn's."""
    return episode.with_tokens(
        np.array(turn.token_ids, np.int32),
        np.zeros(len(turn.token_ids), np.float32),
        turn.ending,
        episode.segments[0].weight_version,
        text=decode(turn.token_ids),
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
