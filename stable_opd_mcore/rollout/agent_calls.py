"""Requests of agents: how they find their session, who waits for a reply, how long an agent takes.

Not here: what becomes of a request (sessions.py), HTTP (serving/).
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stable_opd_mcore.data.chat_api import (
    ChatReply,
    ChatRequest,
    RequestError,
    episode_over,
    unknown_episode,
)
from stable_opd_mcore.host.worker_processes import set_future

if TYPE_CHECKING:
    from stable_opd_mcore.rollout.sessions import Session

_MAX_OVER = 10_000  # ended episodes whose URLs are remembered


class Doorway:
    """Finds the session that a URL belongs to. The one of this process, `DOORWAY`, is safe to use
    from many threads."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._over: deque[str] = deque(maxlen=_MAX_OVER)

    def open(self, session: Session) -> None:
        self._sessions[session.secret] = session

    def close(self, session: Session) -> None:
        if self._sessions.pop(session.secret, None) is not None:
            self._over.append(session.secret)

    def call(self, secret: str, request: ChatRequest) -> Future[ChatReply]:
        """See `Agents` of serving/http_process.py."""
        reply = Future[ChatReply]()
        if (session := self._sessions.get(secret)) is not None:
            session.pool.post(session.called, request, reply)
        else:
            reply.set_exception(episode_over() if secret in self._over else unknown_episode())
        return reply

    def hung_up(self, secret: str, request: ChatRequest) -> None:
        if (session := self._sessions.get(secret)) is not None:
            session.pool.post(session.hung_up, request)


DOORWAY = Doorway()


@dataclass(eq=False)
class Call:
    """A request, and whoever waits for its reply: its client, and those that sent it again."""

    request: ChatRequest
    replies: list[Future[ChatReply]]

    @property
    def is_awaited(self) -> bool:
        return not all(reply.cancelled() for reply in self.replies)

    def reply(self, result: ChatReply | RequestError) -> bool:
        """Whether somebody gets it."""
        self.replies = [each for each in self.replies if not each.cancelled()]
        for each in self.replies:
            set_future(each, result)
        return any(not each.cancelled() for each in self.replies)


class Clock:
    """The time that an agent has for its own work. It stands while the agent waits for a turn."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._state: tuple[float, float | None] = seconds, None  # left, and since when it runs

    def left(self) -> float:
        """At least so many seconds; read in any thread."""
        left, since = self._state
        return self._seconds if since is None else left - (time.monotonic() - since)

    def set(self, *, runs: bool, anew: bool = False) -> None:
        """Let it run or stand, from its whole time if anew."""
        left, since = self._state
        now = time.monotonic()
        if anew:
            left = self._seconds
        elif since is not None:
            left -= now - since
        self._state = left, now if runs else None
