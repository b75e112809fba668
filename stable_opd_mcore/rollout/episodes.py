"""An episode while it is sampled: what the student said so far, and what it observed.

    episode = Episode.begin(prompt, sample_index, weight_version)
    while not episode.is_ended:
        if episode.is_open:                       # its turn lacks tokens
            episode = episode.with_tokens(...)    # at most episode.budget(sampling, window)
        else:                                     # another turn begins, or it ends
            episode = episode.after(what_follows)
    rollout = episode.rollout()

Engines do not change an episode; each method returns another one. Without an environment the first
turn is the whole episode; with one, an observation comes before it. Tokens that the student sampled
are never decoded and encoded again: a turn continues the context of the turn before, or one that
its observation names, unless the observation restarts: then another context begins. `rollout` puts
the turns of each context together.

What an environment answers has three forms: its `Answer` in words (environment_worker.py), the
token ids that the student reads (`Observed`, data/bridge.py), and the `before` of the next `Turn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.horizon import horizon_at
from stable_opd_mcore.data.bridge import Kept, Observed
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import GradingFailure, Prompt, Rollout, Sampling, Segment, Turn


@dataclass(frozen=True)
class End:
    """Why an episode is over, and what it was worth."""

    ending: Ending
    reward: float | None = None  # None: to be graded
    failure: GradingFailure | None = None  # with `failed`
    metrics: Mapping[str, float] = field(default_factory=dict)  # what its environment returned
    feedback: str | None = None  # see Rollout
    account: Mapping[str, int] = field(default_factory=dict[str, int])  # see Rollout
    kept: Kept | None = None  # see Observed


# What follows a turn, or comes before the first one. None: the environment has forgotten the
# episode, which begins anew.
WhatFollows = Observed | End | None
_Part = TypeVar("_Part")


@dataclass(frozen=True, eq=False)
class Episode:
    """The fields of a `Rollout` as far as they are known, with turns in the order in which they
    were sampled, and all token ids of its contexts."""

    prompt: Prompt
    sample_index: int
    contexts: tuple[NDArray[np.int32], ...]  # what the student has read and sampled in each
    token_ids: NDArray[np.int32]  # the sampled ones
    logprobs: NDArray[np.float32]
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...] = (Turn(0, Ending.OPEN),)
    numbers: tuple[int, ...] = (0,)  # the context of each turn
    turn_limit: int | None = None  # the most tokens that whoever asked for the last turn wants
    routed_experts: tuple[NDArray[np.int16], ...] = ()  # of each context; see Rollout
    finish_reason: Ending = Ending.OPEN
    reward: float | None = None
    failure: GradingFailure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # see End
    feedback: str | None = None  # see Rollout
    account: Mapping[str, int] = field(default_factory=dict[str, int])  # see Rollout
    tools: tuple[Mapping[str, Any], ...] = ()  # see Observed
    # With environment.history=template: the messages that the context renders, up to its last turn
    conversation: tuple[Message, ...] = ()

    @staticmethod
    def begin(prompt: Prompt, sample_index: int, weight_version: int) -> Episode:
        """In its first turn, or, where the prompt has an environment, before it."""
        contexts, no_tokens = (np.array(prompt.token_ids, np.int32),), np.empty(0, np.int32)
        segments, logprobs = (Segment(0, weight_version),), np.empty(0, np.float32)
        begun = Episode(prompt, sample_index, contexts, no_tokens, logprobs, segments)
        return begun if prompt.environment is None else replace(begun, turns=(), numbers=())

    @property
    def number(self) -> int:
        """The context of its last turn."""
        return self.numbers[-1] if self.numbers else 0

    @property
    def context(self) -> NDArray[np.int32]:
        """All token ids that the student reads before its next token."""
        return self.contexts[self.number]

    @property
    def is_open(self) -> bool:
        """Whether its last turn may get more tokens."""
        return not self.is_ended and [turn.finish_reason for turn in self.turns[-1:]] == [
            Ending.OPEN
        ]

    @property
    def awaits_observation(self) -> bool:
        """Whether a turn is over, or none has begun, and what follows is not known."""
        return not self.is_open and not self.is_ended

    @property
    def is_ended(self) -> bool:
        return self.finish_reason != Ending.OPEN

    def limit(self, sampling: Sampling) -> int:
        """The most tokens that its last turn may have."""
        most = self._limit_of_run(sampling)
        return most if self.turn_limit is None else min(most, self.turn_limit)

    def _limit_of_run(self, sampling: Sampling) -> int:
        own, step = self.prompt.max_new_tokens, sampling.training_step
        if own is None:
            return sampling.max_new_tokens
        if sampling.horizon is None or step is None:
            return own
        return horizon_at(step, *sampling.horizon, own)

    def budget(self, sampling: Sampling, window: int) -> int:
        """How many tokens its last turn may still get, by the limit of a turn and the window."""
        left = self.limit(sampling) - self.turns[-1].num_tokens
        return min(left, window - len(self.context))

    def with_tokens(
        self,
        token_ids_L: NDArray[np.int32],
        logprobs_L: NDArray[np.float32],
        finish_reason: Ending,
        weight_version: int,
        *,
        text: str = "",
        routed_experts: NDArray[np.int16] | None = None,
    ) -> Episode:
        """With L more tokens in its last turn, which ends unless the finish reason is "open".

        text: the turn's; routed_experts: those of the whole context.
        """
        assert self.is_open
        *turns, turn = self.turns
        num_tokens = turn.num_tokens + len(token_ids_L)
        turn = replace(turn, num_tokens=num_tokens, finish_reason=finish_reason, text=text)
        *segments, last = self.segments
        if last.num_tokens and last.weight_version != weight_version:
            segments, last = [*segments, last], Segment(0, weight_version)
        segments.append(Segment(last.num_tokens + len(token_ids_L), weight_version))
        routed = self.routed_experts
        if routed_experts is not None:
            routed = _with(routed, self.number, routed_experts)
        return replace(
            self,
            contexts=_with(self.contexts, self.number, np.concatenate([self.context, token_ids_L])),
            token_ids=np.concatenate([self.token_ids, token_ids_L]),
            logprobs=np.concatenate([self.logprobs, logprobs_L]),
            segments=tuple(segments),
            turns=(*turns, turn),
            routed_experts=routed,
        )

    def after(self, what: WhatFollows) -> Episode:
        """With another turn, before which the student reads what it observed, or ended."""
        assert self.awaits_observation
        if what is None:
            return Episode.begin(self.prompt, self.sample_index, self.segments[0].weight_version)
        if what.kept is not None:
            return self._cut(what.kept).after(replace(what, kept=None))
        if isinstance(what, End):
            ended = {"reward": what.reward, "failure": what.failure, "metrics": what.metrics}
            ended |= {"feedback": what.feedback, "account": what.account}
            return replace(self, finish_reason=what.ending, **ended)
        read = np.array(what.token_ids, np.int32)
        contexts, number = self.contexts, self.number if what.context is None else what.context
        if what.restarts:
            contexts = (*contexts, read) if self.turns else (read,)
            number = len(contexts) - 1
        else:
            contexts = _with(contexts, number, np.concatenate([contexts[number], read]))
        told = {"observed": what.text, "messages": what.messages}
        turn = Turn(0, Ending.OPEN, what.token_ids, what.restarts, **told)
        lasting = {"conversation": what.conversation, "tools": what.tools}
        return replace(
            self,
            contexts=contexts,
            turns=(*self.turns, turn),
            numbers=(*self.numbers, number),
            turn_limit=what.max_new_tokens,
            **lasting,
        )

    def _cut(self, kept: Kept) -> Episode:
        """With only the first tokens of its last turn: the next ones were sampled after a text at
        which whoever asked for the turn wants it to stop. What came before them has the same
        distribution as without them."""
        *turns, turn = self.turns
        num_left_out = turn.num_tokens - kept.num_tokens
        assert 0 < kept.num_tokens <= turn.num_tokens
        turn = replace(turn, num_tokens=kept.num_tokens, finish_reason=Ending.STOP, text=kept.text)
        of_tokens = np.arange(len(self.token_ids) - num_left_out)
        routed, number = self.routed_experts, self.number
        if num_left_out and len(routed) > number:
            routed = _with(routed, number, routed[number][:-num_left_out])
        return replace(
            self,
            contexts=_with(self.contexts, number, self.context[: len(self.context) - num_left_out]),
            token_ids=self.token_ids[of_tokens],
            logprobs=self.logprobs[of_tokens],
            segments=_segments_of(self.segments, of_tokens),
            turns=(*turns, turn),
            routed_experts=routed,
        )

    def _by_context(self) -> Episode:
        """With the turns of each context one after the other."""
        order = sorted(range(len(self.turns)), key=lambda place: self.numbers[place])
        if order == [*range(len(self.turns))]:
            return self
        ends = np.cumsum([turn.num_tokens for turn in self.turns])
        places = [np.arange(ends[i] - self.turns[i].num_tokens, ends[i]) for i in order]
        of_tokens = np.concatenate(places)
        return replace(
            self,
            token_ids=self.token_ids[of_tokens],
            logprobs=self.logprobs[of_tokens],
            segments=_segments_of(self.segments, of_tokens),
            turns=tuple(self.turns[i] for i in order),
            numbers=tuple(self.numbers[i] for i in order),
        )

    def rollout(self) -> Rollout:
        ordered = self._by_context()
        return Rollout(
            self.prompt,
            self.sample_index,
            ordered.token_ids,
            ordered.logprobs,
            self.finish_reason,
            ordered.segments[0].weight_version,
            ordered.turns[-1].text if self.turns else "",
            self.reward,
            self.failure,
            routed_experts=np.concatenate(self.routed_experts) if self.routed_experts else None,
            segments=ordered.segments,
            turns=ordered.turns,
            metrics=self.metrics,
            feedback=self.feedback,
            account=self.account,
        )


def _with(parts: tuple[_Part, ...], number: int, part: _Part) -> tuple[_Part, ...]:
    """The parts, with this one in the place of the one of this number or, first, after them."""
    return (*parts[:number], part, *parts[number + 1 :])


def _segments_of(segments: Sequence[Segment], of_tokens: NDArray[np.intp]) -> tuple[Segment, ...]:
    """The segments of some of the sampled tokens, in their new order."""
    lengths = [segment.num_tokens for segment in segments]
    versions = np.repeat([segment.weight_version for segment in segments], lengths)[of_tokens]
    borders = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(Segment(b - a, int(versions[a])) for a, b in pairwise(borders))
