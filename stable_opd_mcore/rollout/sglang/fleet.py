"""One data-parallel rank's servers: which of them may be sent requests.

A server that fails takes no more requests; this run's own servers are killed and restarted at once,
while the others continue. Servers with requests in flight are probed all the time.

States of a member: restarting -> needs_weights -> ready -> failed -> restarting ... Only
`weights_arrived` makes a member ready. Colocated ones are `released` while the trainer has the GPU,
and need weights afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import RefusedRequest, ServerFailure, SglangClient
from stable_opd_mcore.serving.idle_clock import IdleClock
from stable_opd_mcore.serving.process import (
    ServerStartError,
    SglangServer,
    UnsupportedRelease,
    await_answer,
    check_release,
)

_MAX_MISSED_PROBES = 2
MAX_RESTARTS = 3  # restarts of one data-parallel rank's servers in RESTART_WINDOW_MINUTES
RESTART_WINDOW_MINUTES = 60.0


@dataclass
class Member:
    """One server and its state."""

    name: str
    client: SglangClient
    server: SglangServer | None  # None: external, so this run cannot restart it
    tensor: int = 1  # tensor-parallel ranks; an external server states its own
    state: str = "restarting"  # restarting | released | needs_weights | ready | failed
    leaders: int = 1  # data-parallel ranks that share the server
    in_flight: int = 0  # this rank's responses that it samples
    max_in_flight: int = 2**31  # this rank's share of what the server samples at a time
    has_answered: bool = False  # a request or a probe; before, it may be compiling kernels
    missed_probes: int = 0
    life: int = 0  # the number of failures so far; each ends the server's process groups
    # its name of the student's low-rank factors, which each request for the student must give: a
    # request without it is answered by the frozen weights; None: the weights have them
    adapter: str | None = None

    def reconnect(self) -> None:
        """Fail the requests in flight; later requests use new connections."""
        self.client.close()
        self.client = replace(self.client)
        self.life += 1


@dataclass(eq=False)
class Fleet:
    """Members, their starts, failures and restarts."""

    members: Sequence[Member]
    events: EventLog
    # whether the run is about to end; then no member is waited for
    stop_requested: Callable[[], bool] = lambda: False
    progress: Callable[[], None] = lambda: None  # called by worker threads: an accepted answer

    def __post_init__(self) -> None:
        self.lost: str | None = None  # why the fleet cannot continue
        self.idle = IdleClock([member.name for member in self.members])
        self._restarts: deque[float] = deque()  # when, in monotonic seconds, the oldest first
        self._watcher: threading.Thread | None = None
        self._probing = threading.Lock()  # held during a health probe
        self._stopped = threading.Event()
        self._lock = threading.RLock()

    @property
    def is_restarting(self) -> bool:
        """Whether a server of this run is being restarted; MAX_RESTARTS bounds how often."""
        with self._lock:  # a thread that takes a server out of use has decided
            return any(m.state == "restarting" and m.server is not None for m in self.members)

    def start(self) -> None:
        """Start this run's servers, all at once, and wait for every member."""
        for member in self.members:
            if member.server is not None:
                member.server.start()
        self.await_restarts()

    def stop(self) -> None:
        """End this run's servers and close all connections."""
        self._stopped.set()
        with self._lock:  # a restart in another thread has ended, or it finds `_stopped` set
            for member in self.members:
                member.client.close()
                if member.server is not None:
                    member.server.stop()

    def fail(self, member: Member, reason: str) -> None:
        """Take a member out of use; kill and restart it if it is this run's. Without a restart left
        the fleet is lost."""
        with self._lock:
            if member.state in ("failed", "restarting") or self._stopped.is_set():
                return  # another thread has reported the failure, or `stop` has ended the request
            member.state = "failed"
            self.events.add("failure", member.name, reason)
            member.reconnect()
            if member.server is None:
                member.state = "restarting"  # an external server: wait until it answers again
            elif self._may_restart():
                self._restart(member, member.server)
            else:
                member.server.stop()
                self.lose(
                    f"{member.name} failed after {MAX_RESTARTS} restarts in "
                    f"{RESTART_WINDOW_MINUTES:g} minutes, which is the limit ({reason})"
                )

    def lose(self, reason: str) -> None:
        """Declare that the fleet cannot continue."""
        self.lost = reason
        self.events.add("lost", "fleet", reason)

    def await_restarts(self) -> None:
        """Wait until every restarting member answers and needs weights, or the fleet is lost."""
        for member in self.members:
            while self._is_awaited(member):
                self._await(member)

    def weights_arrived(self, member: Member, adapter: str | None = None) -> None:
        """Make a member ready: it has the current weights, verified."""
        with self._lock:
            if member.state == "needs_weights":
                member.state, member.adapter = "ready", adapter

    def weights_outdated(self, member: Member) -> None:
        """Send a member no request until it has the current weights."""
        with self._lock:
            if member.state == "ready":
                member.state = "needs_weights"

    def release_memory(self) -> None:
        """Colocated: release the GPU memory, after waiting for restarts, which take memory."""
        with self._probing:  # a server with a queued health probe crashes on release
            assert not any(member.in_flight for member in self.members)
        done, tags = ("released", "failed"), ["kv_cache", "weights"]
        while self.lost is None and any(member.state not in done for member in self.members):
            self.await_restarts()
            for member in self.members:
                if member.state in ("ready", "needs_weights"):
                    self._move_memory(member, "/release_memory_occupation", tags, "released")

    def resume_memory(self) -> None:
        """Allocate again what was released."""
        tags = ["weights", "kv_cache"]
        for member in self.members:
            if member.state == "released":
                self._move_memory(member, "/resume_memory_occupation", tags, "needs_weights")

    def _move_memory(self, member: Member, path: str, tags: list[str], state: str) -> None:
        """Let the member do as asked, and set its new state; else it has failed."""
        try:
            member.client.call("POST", path, {"tags": tags}, timeouts.UPDATE)
            member.state = state
        except (ServerFailure, RefusedRequest) as error:
            self.fail(member, str(error))

    def _is_awaited(self, member: Member) -> bool:
        with self._lock:  # see `is_restarting`
            ended = self.lost is not None or self._stopped.is_set()
            return member.state == "restarting" and not ended

    def _await(self, member: Member) -> None:
        """Wait for one start; after a failed one restart the server or lose the fleet."""
        try:
            if member.server is not None:
                member.server.wait_until_healthy(self.stop_requested)
            else:
                defect = await_answer(member.client, self.stop_requested)
                if defect is not None:
                    raise ServerStartError(f"{member.client.url} {defect}")
            check_release(member.client.release(), member.client.url)
            if member.server is None:
                member.tensor = member.client.tensor_ranks()  # may differ after each start
            member.max_in_flight = max(1, member.client.capacity() // member.leaders)
        except (ServerStartError, ServerFailure, RefusedRequest) as error:
            with self._lock:
                self.events.add("failure", member.name, f"did not start: {error}")
                hopeless = isinstance(error, UnsupportedRelease) or self.stop_requested()
                if member.server is not None and self._may_restart() and not hopeless:
                    self._restart(member, member.server)
                else:
                    self.lose(f"{member.name} does not start: {error}")
            return
        with self._lock:
            member.state = "needs_weights"
            member.has_answered, member.missed_probes = False, 0

    def _may_restart(self) -> bool:
        """Whether there were fewer than MAX_RESTARTS restarts in the window that ends now."""
        begin = time.monotonic() - 60 * RESTART_WINDOW_MINUTES
        while self._restarts and self._restarts[0] < begin:
            self._restarts.popleft()
        return len(self._restarts) < MAX_RESTARTS

    def _restart(self, member: Member, server: SglangServer) -> None:
        """End the server and start it again; without a start the fleet is lost."""
        server.stop()
        if self._stopped.is_set():
            return
        self._restarts.append(time.monotonic())
        detail = f"{len(self._restarts)} of {MAX_RESTARTS}"
        minutes = f"{RESTART_WINDOW_MINUTES:g} minutes"
        self.events.add("restart", member.name, f"{detail} in {minutes}")
        try:
            server.start()
        except (OSError, ServerStartError) as error:  # else a worker thread would end silently
            self.lose(f"{member.name} cannot be restarted: {error}")
        else:
            member.state = "restarting"

    def watch(self) -> None:
        """Probe members in the background from now on, while requests are in flight."""
        if self._watcher is None or not self._watcher.is_alive():  # an error has ended it
            self._watcher = threading.Thread(target=self._watch, name="health", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Fail members that do not answer any more."""
        interval = timeouts.HEALTH_INTERVAL
        while not self._stopped.wait(interval):
            if not any(member.in_flight for member in self.members):
                continue
            for member in self.members:
                with self._probing:
                    if member.state == "ready" and member.in_flight:
                        self._probe(member, interval)

    def _probe(self, member: Member, seconds: float) -> None:
        if member.client.is_healthy(timeout_seconds=seconds):
            member.has_answered, member.missed_probes = True, 0
            return
        member.missed_probes += member.has_answered
        if member.missed_probes >= _MAX_MISSED_PROBES and member.in_flight:
            self.fail(member, f"hung: {_MAX_MISSED_PROBES} health probes went unanswered")


def is_leader(world: World) -> bool:
    """Whether this rank talks to servers for its replica."""
    return world.tensor_rank == 0 and world.pipeline_rank == 0
