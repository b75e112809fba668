"""A request of an agent with whoever waits for its reply, and the time that an agent has.

Not here: what becomes of a request (sessions.py).
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, RequestError
from stable_opd_mcore.host.worker_processes import set_future


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
        """The seconds left, or all of them while the clock stands. Safe to call in any thread."""
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
