"""How long servers had nothing to do for this process: no request in flight, no weights sent."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stable_opd_mcore.metrics import Mean


class IdleClock:
    """Adds up the idle seconds of some servers. Safe to use from many threads."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._in_flight = dict.fromkeys(servers, 0)
        self._has_asked = False
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        with self._lock:
            self._began = self._now = time.perf_counter()
            self._idle_seconds = 0.0  # between these two, over all servers

    def count(self, server: str, change: int) -> None:
        """Note that `change` more requests are in flight, or with -1 one less."""
        with self._lock:
            self._advance()
            self._has_asked = True
            self._in_flight[server] += change

    @contextmanager
    def busy(self, servers: Sequence[str]) -> Iterator[None]:
        """The servers have something to do while the block runs, even if it raises."""
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
            self._advance()
            seconds = len(self._in_flight) * (self._now - self._began)
            return Mean(self._idle_seconds, seconds) if self._has_asked else Mean(0, 0)

    def _advance(self) -> None:
        before, self._now = self._now, time.perf_counter()
        num_idle = sum(not number for number in self._in_flight.values())
        self._idle_seconds += num_idle * (self._now - before)
