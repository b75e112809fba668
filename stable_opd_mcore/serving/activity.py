"""What servers did when, as this process saw it: requests in flight, weights on their way.

    activity = Activity(["server_0", "server_1"])
    with activity.during("draws", ["server_0"]): ...
    spans = activity.take()  # at the end of a step

A server that several processes share is seen by each in part: only their spans together say when it
was idle (monitoring/timeline.py). Not here: what a server computes between a request and its reply.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """A time in which a role of a run did one thing."""

    what: str
    start: float  # seconds of a clock that the holder knows
    end: float


Spans = Mapping[str, Sequence[Span]]  # by server


class Activity:
    """Spans of time.perf_counter() of each server. Safe to use from many threads.

    Args:
        servers: all that `take` names, also those that did nothing.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self._servers = tuple(servers)
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by server and what it does
        self._starts: dict[tuple[str, str], float] = {}  # since when the count is above 0
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)

    def count(self, what: str, server: str, change: int) -> None:
        """Note that `change` more requests are in flight, or with -1 one less."""
        key, now = (server, what), time.perf_counter()
        with self._lock:
            before = self._counts[key]
            self._counts[key] += change
            if not before:
                self._starts[key] = now
            elif not self._counts[key]:
                self._spans[server].append(Span(what, self._starts.pop(key), now))

    @contextmanager
    def during(self, what: str, servers: Sequence[str]) -> Iterator[None]:
        """The servers do this while the block runs, also if it raises."""
        for server in servers:
            self.count(what, server, 1)
        try:
            yield
        finally:
            for server in servers:
                self.count(what, server, -1)

    def take(self) -> dict[str, list[Span]]:
        """The spans since the last call; those that have not ended are cut now and go on."""
        now = time.perf_counter()
        with self._lock:
            taken, self._spans = self._spans, defaultdict(list)
            for (server, what), start in self._starts.items():
                taken[server].append(Span(what, start, now))
            self._starts = dict.fromkeys(self._starts, now)
        return {server: taken[server] for server in self._servers}
