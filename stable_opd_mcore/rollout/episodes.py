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
are never decoded and encoded again: the context of a turn is that of the turn before with its
tokens, unless an observation restarts it.

What an environment answers has three forms: its `Answer` in words (environment_worker.py), the
token ids that the student reads (`Observed`, data/bridge.py), and the `before` of the next `Turn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.horizon import horizon_at
from stable_opd_mcore.data.bridge import Observed
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


# What follows a turn, or comes before the first one. None: the environment has forgotten the
# episode, which begins anew.
WhatFollows = Observed | End | None


@dataclass(frozen=True, eq=False)
class Episode:
    """The fields of a `Rollout` as far as they are known, and the context of the next token."""

    prompt: Prompt
    sample_index: int
    context: NDArray[np.int32]  # all token ids that the student reads before its next token
    token_ids: NDArray[np.int32]  # the sampled ones
    logprobs: NDArray[np.float32]
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...] = (Turn(0, Ending.OPEN),)
    routed_experts: tuple[NDArray[np.int16], ...] = ()  # of each context; see Rollout
    finish_reason: Ending = Ending.OPEN
    reward: float | None = None
    failure: GradingFailure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # see End
    tools: tuple[Mapping[str, Any], ...] = ()  # see Observed
    # With environment.history=template: the messages that the context renders, up to its last turn
    conversation: tuple[Message, ...] = ()

    @staticmethod
    def begin(prompt: Prompt, sample_index: int, weight_version: int) -> Episode:
        """In its first turn, or, where the prompt has an environment, before it."""
        context, no_tokens = np.array(prompt.token_ids, np.int32), np.empty(0, np.int32)
        segments = (Segment(0, weight_version),)
        turns = (Turn(0, Ending.OPEN),) if prompt.environment is None else ()
        logprobs = np.empty(0, np.float32)
        return Episode(prompt, sample_index, context, no_tokens, logprobs, segments, turns)

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
        """The most tokens that a turn may have."""
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
            num_contexts_before = sum(turn.restarts for turn in self.turns[1:])
            routed = (*routed[:num_contexts_before], routed_experts)
        return replace(
            self,
            context=np.concatenate([self.context, token_ids_L]),
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
        if isinstance(what, End):
            ended = {"reward": what.reward, "failure": what.failure, "metrics": what.metrics}
            return replace(self, finish_reason=what.ending, **ended)
        read = np.array(what.token_ids, np.int32)
        context = read if what.restarts else np.concatenate([self.context, read])
        turn = Turn(0, Ending.OPEN, what.token_ids, what.restarts, observed=what.text)
        turns = (*self.turns, turn)
        lasting = {"conversation": what.conversation, "tools": what.tools}
        return replace(self, context=context, turns=turns, **lasting)

    def rollout(self) -> Rollout:
        return Rollout(
            self.prompt,
            self.sample_index,
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            self.segments[0].weight_version,
            self.turns[-1].text if self.turns else "",
            self.reward,
            self.failure,
            routed_experts=np.concatenate(self.routed_experts) if self.routed_experts else None,
            segments=self.segments,
            turns=self.turns,
            metrics=self.metrics,
        )
