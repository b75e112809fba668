"""How long servers had nothing to do for this process: no request in flight, no weights sent.

Not here: what a server does for other processes, or computes between a request and its reply.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stable_opd_mcore.metrics import Mean


class IdleClock:
    """Adds up the idle seconds of some servers. Safe to use from many threads."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._servers = tuple(dict.fromkeys(servers))
        self._lock = threading.Lock()
        self._in_flight: Counter[str] = Counter()
        self._has_asked = False
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        with self._lock:
            self._began = time.perf_counter()
            self._idle_seconds = 0.0  # up to the last request that found its server idle
            self._idle_since = dict.fromkeys(self._servers, self._began)

    def count(self, server: str, change: int) -> None:
        """Note that `change` more requests are in flight, or with -1 one less."""
        with self._lock:
            self._has_asked = True
            was_busy = self._in_flight[server] > 0
            self._in_flight[server] += change
            if not was_busy:
                self._idle_seconds += time.perf_counter() - self._idle_since[server]
            elif not self._in_flight[server]:
                self._idle_since[server] = time.perf_counter()

    @contextmanager
    def busy(self, servers: Sequence[str]) -> Iterator[None]:
        """The servers have something to do while the block runs, also if it raises."""
        for server in servers:
            self.count(server, 1)
        try:
            yield
        finally:
            for server in servers:
                self.count(server, -1)

    def idle_share(self) -> Mean:
        """The idle share of the time since `restart`, as a mean over the servers; a mean over
        nothing in a process that has never asked them for anything."""
        with self._lock:
            now = time.perf_counter()
            idle = self._idle_seconds + sum(
                now - self._idle_since[server]
                for server in self._servers
                if not self._in_flight[server]
            )
            seconds = len(self._servers) * (now - self._began)
            return Mean(idle, seconds) if self._has_asked else Mean(0, 0)
