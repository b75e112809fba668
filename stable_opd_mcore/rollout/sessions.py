"""One episode of an agent: its requests, their turns, its limits, and how it ends.

A session stands between an engine, which asks what follows a turn (`observe`), and the agent's
requests (`called`). Requests come again, when a client has given up: a request that was sent before
gets the turn that it got or will get, if it says that it is a retry, or if nobody got that turn.
Any other one gets another turn. Not here: processes and threads (agents.py), who waits for a
request (agent_calls.py), which context it continues (histories.py).
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.bridge import Kept, Observed
from stable_opd_mcore.data.chat_api import (
    ChatReply,
    ChatRequest,
    RequestError,
    context_full,
    episode_over,
)
from stable_opd_mcore.data.thoughts import opens_thinking
from stable_opd_mcore.data.tool_calls import ToolCalls
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.host.worker_processes import set_future
from stable_opd_mcore.rollout.agent_account import num_repeated
from stable_opd_mcore.rollout.agent_calls import Call, Clock
from stable_opd_mcore.rollout.environment_answers import Answer
from stable_opd_mcore.rollout.environment_process import EnvironmentFailure
from stable_opd_mcore.rollout.episodes import End, Episode, WhatFollows
from stable_opd_mcore.rollout.histories import Histories


class Pool(Protocol):
    """What a session needs of the pool that plays it (agents.py)."""

    def post(self, event: Callable[..., object], *arguments: Any) -> None:
        """Have this called in the thread in which sessions change."""
        ...

    def remove(self, session: Session, account: Counter[str]) -> None:
        """Forget a session that is over, and add what is counted of it."""
        ...

    def stop(self, session: Session) -> None:
        """Close the URL of a session that is over, and kill its processes."""
        ...

    def begins_anew(self, session: Session, reason: str) -> bool:
        """Whether a failed episode is played from its beginning."""
        ...

    def note_refusal(self, session: Session, reason: str) -> None:
        """Note why the run has to end."""
        ...

    def note_ignored(self, names: Sequence[str]) -> None:
        """Log settings of requests that have no effect, each once."""
        ...


class Asked(NamedTuple):
    """An episode of which an engine asks what follows."""

    key: Hashable
    episode: Episode
    is_training: bool
    max_turns: int
    seed: int


@dataclass(frozen=True)
class Student:
    """What requests and turns are for the student."""

    histories: Callable[[Sequence[int]], Histories]  # of an episode, from its row's prompt
    calls: ToolCalls
    window: int  # the most tokens that it reads
    check_roles: Callable[[frozenset[str]], None]  # raises DataError where the run has to end


class Session:
    """One episode of an agent. Its methods are called in the thread of its pool."""

    def __init__(
        self, pool: Pool, number: int, asked: Asked, student: Student, timeout_seconds: float
    ) -> None:
        self.pool, self.number, self.secret = pool, number, secrets.token_hex(16)
        self.asked, self._student = asked, student
        self.clock = Clock(timeout_seconds)
        self.is_over = False
        self._histories = student.histories(asked.episode.prompt.token_ids)
        self._seen: Future[WhatFollows] | None = None  # the engine waits for it
        self._outcome: tuple[WhatFollows | UserError] | None = None  # of the episode
        self._queue: deque[Call] = deque()
        self._open: Call | None = None  # its turn is sampled
        self._kept: Kept | None = None  # of the last turn
        self._given: dict[str, ChatReply] = {}  # the last reply to each body
        self._unread: dict[str, ChatReply] = {}  # the replies that nobody got
        self._last_refusal = ""
        self.counts: Counter[str] = Counter()

    @property
    def row(self) -> dict[str, Any]:
        return dict(self.asked.episode.prompt.columns or {})

    @property
    def _calls(self) -> list[Call]:
        """Those without a reply: the one whose turn is sampled first, and then as they came."""
        return [*([self._open] if self._open else []), *self._queue]

    def observe(self, asked: Asked, seen: Future[WhatFollows]) -> None:
        """Give the reply that the last turn is, and find what follows it."""
        self.asked, self._seen = asked, seen
        if (call := self._open) is not None:
            self._open = None
            reply = self._reply(call.request)
            self._given[call.request.body_key] = reply
            if not call.reply(reply):
                self._unread[call.request.body_key] = reply
            self._set_clock(anew=True)
        self._advance()

    def called(self, request: ChatRequest, reply: Future[ChatReply]) -> None:
        """A request, whose reply is cancelled if its client goes."""
        self.pool.note_ignored(request.ignored)
        key, given = request.body_key, None
        if self.is_over:
            set_future(reply, episode_over())
            return
        for call in self._calls:
            if call.request.body_key == key and (request.is_retry or not call.is_awaited):
                call.replies.append(reply)
                self.counts["retries"] += 1
                break
        else:
            given = self._unread.pop(key, None)
            if given is None and request.is_retry:
                given = self._given.get(key)
            if given is not None:
                self.counts["retries"] += 1
                set_future(reply, given)
            else:
                self._queue.append(Call(request, [reply]))
        self._set_clock(anew=given is not None)
        self._advance()

    def hung_up(self, request: ChatRequest) -> None:
        """A client has gone before its reply was sent."""
        waits = any(call.request.body_key == request.body_key for call in self._calls)
        if not waits and request.body_key in self._given:
            self._unread[request.body_key] = self._given[request.body_key]
        self._set_clock()

    def refused(self, error: RequestError) -> None:
        """A request that gets an error."""
        self.counts["refused_requests"] += 1
        self._last_refusal = f"; its last request was refused: {error}"

    def returned(self, result: Answer | EnvironmentFailure | UserError) -> None:
        """The user's function has ended."""
        if self.is_over:
            return
        if isinstance(result, UserError):
            self.end(result)
        elif isinstance(result, EnvironmentFailure):
            self._fail(result)
        elif not self.asked.episode.turns and self._open is None:
            reason = "it returned without a request that got a turn: let it call base_url"
            self._fail(EnvironmentFailure("invalid", reason))
        else:
            told = {"metrics": result.metrics, "feedback": result.feedback}
            self.end(End(Ending.STOP, result.reward, **told))

    def end(self, outcome: WhatFollows | UserError) -> None:
        """Nothing more of this session is sampled; what the function started is killed."""
        if self.is_over:
            return
        self.is_over, self._outcome = True, (outcome,)
        self.pool.stop(self)
        for call in self._queue:
            call.reply(episode_over())
        self._queue.clear()
        self._advance()

    def break_off(self, error: BaseException) -> None:
        """Raise an error where the next observation is waited for."""
        if self._seen is not None:
            set_future(self._seen, error)
            self._seen = None

    # ---- what follows a turn

    def _advance(self) -> None:
        """Give the engine what follows, if it waits and something does."""
        while self._seen is not None and self._open is None:
            if self._outcome is not None:
                (what,) = self._outcome
                account = self._account(what)
                self.pool.remove(self, account)
                self._give(replace(what, account=account) if isinstance(what, End) else what)
            elif not self._queue:
                return
            elif (observed := self._what_follows(self._queue.popleft())) is not None:
                self._give(observed)

    def _give(self, what: WhatFollows | UserError) -> None:
        seen, self._seen = self._seen, None
        if isinstance(what, Observed | End):
            what, self._kept = replace(what, kept=self._kept), None
        assert seen is not None
        set_future(seen, what)

    def _what_follows(self, call: Call) -> Observed | None:
        """What a request lets the student read; None: it gets no turn."""
        if not call.is_awaited:
            return None
        if len(self.asked.episode.turns) >= self.asked.max_turns:
            call.reply(episode_over())
            self.end(End(Ending.TURNS, 0.0))
            return None
        try:
            observed = self._observed(call.request)
        except RequestError as error:
            self.refused(error)
            call.reply(error)
            self._set_clock()
            return None
        try:
            self._student.check_roles(self._histories.roles)
        except DataError as error:  # the run ends later, on all ranks together
            self.pool.note_refusal(self, str(error))
            call.reply(episode_over())
            self.end(End(Ending.REFUSED, 0.0))
            return None
        self._open = call
        self.counts["forced_calls"] += call.request.forces_call
        return replace(observed, tools=call.request.tools, max_new_tokens=call.request.max_tokens)

    def _observed(self, request: ChatRequest) -> Observed:
        """Raises RequestError where the request gets no turn."""
        if request.tools and (reason := self._student.calls.refusal()) is not None:
            raise RequestError(400, "tools_unsupported", reason)
        try:
            observed = self._histories.observed(request)
        except DataError as error:
            raise RequestError(400, "invalid_messages", str(error)) from error
        length = self._histories.length(observed)
        if length >= self._student.window:
            raise context_full(length, self._student.window)
        return observed

    def _reply(self, request: ChatRequest) -> ChatReply:
        """The student's last turn as a reply; the histories note it."""
        episode, turn = self.asked.episode, self.asked.episode.turns[-1]
        ids, text = episode.token_ids[len(episode.token_ids) - turn.num_tokens :], turn.text
        stop_text = ""
        if (place := _first_stop(text, request.stop)) is not None:
            begin, end = place
            stop_text = text[begin:end]
            self._kept = self._cut(ids, text[:end])
            self.counts["stop_cut_tokens"] += turn.num_tokens - self._kept.num_tokens
            text = text[:begin]
        self.counts["sampled_tokens"] += turn.num_tokens
        num_tokens = turn.num_tokens if self._kept is None else self._kept.num_tokens
        was_cut = self._kept is None and turn.finish_reason == Ending.LENGTH
        opened = turn.before or turn.restarts
        said = self._student.calls.parse(
            text,
            request.tools,
            was_cut,
            opens_thinking(turn.observed) if opened else episode.prompt.opens_thinking,
            request.body_key,
        )
        self.counts["unparsed_calls"] += said.is_damaged
        num_read = len(episode.context) - turn.num_tokens
        reply = ChatReply(
            said.content,
            said.reasoning,
            said.calls,
            "length" if was_cut else "tool_calls" if said.calls else "stop",
            num_read,
            num_tokens,
            stop_text,
        )
        self._histories.said(reply, episode.context[: num_read + num_tokens])
        return reply

    def _cut(self, ids: NDArray[np.int32], text: str) -> Kept:
        """The fewest tokens whose text begins with this one."""
        decode = self._histories.decode

        def has_all(count: int) -> bool:
            return decode(ids[:count].tolist()).startswith(text)

        count = bisect_left(range(len(ids)), True, lo=1, key=has_all)
        return Kept(count, decode(ids[:count].tolist()))

    # ---- failures and the account

    def _fail(self, failure: EnvironmentFailure) -> None:
        reason = f"{failure}{self._last_refusal}"
        if self.pool.begins_anew(self, reason):
            self.end(None)
        else:
            self.end(End(Ending.FAILED, 0.0, failure.failure))

    def _account(self, outcome: WhatFollows | UserError) -> Counter[str]:
        """COUNTS and TOKENS of the episode, at its end."""
        counts = self.counts + self._histories.counts + Counter(unread_turns=len(self._unread))
        if isinstance(outcome, End) and outcome.ending != Ending.FAILED:
            contexts = self._histories.contexts
            counts["trained_tokens"] = counts["sampled_tokens"] - counts["stop_cut_tokens"]
            counts["context_tokens"] = sum(map(len, contexts))
            counts["repeated_tokens"] = num_repeated(contexts)
        return +counts

    @property
    def first_rewritten(self) -> str:
        return self._histories.first_rewritten

    def _set_clock(self, anew: bool = False) -> None:
        self.clock.set(runs=not any(call.is_awaited for call in self._calls), anew=anew)


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the first of these texts begins and ends; None: none is there."""
    places = [(at, at + len(each)) for each in stops if (at := text.find(each)) >= 0]
    return min(places, key=lambda place: place[1], default=None)
