"""One data-parallel rank's servers: many requests in flight, none of them lost or counted twice.

A request goes to the ready server with the fewest requests in flight. A server that fails takes no
more requests; this run's own servers are killed and restarted at once, while the others work on.
The failed server's requests go to the others; a request without any server left returns None.

States of a member: restarting -> needs_weights -> ready -> failed -> restarting ... Only
`weights_arrived` makes a member ready. Colocated ones are `released` while the trainer has the GPU,
and need weights afterwards. Not here: sending weights (sync.py), agreement between ranks
(engine.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import (
    ATTEMPTS,
    RefusedRequest,
    ServerFailure,
    SglangClient,
    pause_seconds,
)
from stable_opd_mcore.serving.compiling import CompilerWatch
from stable_opd_mcore.serving.process import (
    ServerStartError,
    SglangServer,
    UnsupportedRelease,
    await_answer,
    check_release,
)
from stable_opd_mcore.serving.requests import Completion, Generation

_MAX_IN_FLIGHT = 256  # per server, which batches and queues them itself
_MAX_MISSED_PROBES = 2
RESTART_WINDOW_MINUTES = 60.0  # over which max_restarts counts


@dataclass
class Member:
    """One server and its state."""

    name: str
    client: SglangClient
    server: SglangServer | None  # None: external, so this run cannot restart it
    tensor: int = 1  # tensor-parallel ranks; an external server states its own
    state: str = "restarting"  # restarting | released | needs_weights | ready | failed
    in_flight: int = 0
    missed_probes: int = 0
    life: int = 0  # the number of failures so far; each ends the server's process groups

    def reconnect(self) -> None:
        """Fail the requests in flight; later requests use new connections."""
        self.client.close()
        self.client = replace(self.client)
        self.life += 1


@dataclass(frozen=True)
class ServerStatus:
    """A server as one leader tells all ranks about it, or as all its leaders together."""

    name: str
    url: str
    api_key: str | None
    state: str  # of Member
    tensor: int
    life: int  # how often leaders saw it fail
    sender: int | None  # the data-parallel rank that sends it the weights; None: another knows


@dataclass(eq=False)
class Fleet:
    """Draws responses until each request is answered or no member is ready."""

    members: Sequence[Member]
    events: EventLog
    settings: SglangConfig
    # whether the run is about to end; then no member is waited for
    stop_requested: Callable[[], bool] = lambda: False
    progress: Callable[[], None] = lambda: None  # called by worker threads: an accepted answer

    def __post_init__(self) -> None:
        self.lost: str | None = None  # why the fleet cannot go on
        self._restarts: deque[float] = deque()  # when, in monotonic seconds, the oldest first
        self._redrawn: Counter[str] = Counter()  # responses to draw again, by the failed member
        self._retried: Counter[str] = Counter()  # requests repeated to the same member
        self._watcher: threading.Thread | None = None  # of the newest draw
        self._lock = threading.RLock()

    @property
    def is_restarting(self) -> bool:
        """Whether a server of this run is being restarted; `max_restarts` bounds how often."""
        return any(m.state == "restarting" and m.server is not None for m in self.members)

    def start(self) -> None:
        """Start this run's servers, all at once, and wait for every member."""
        for member in self.members:
            if member.server is not None:
                member.server.start()
        self.await_restarts()

    def stop(self) -> None:
        """End this run's servers and close all connections."""
        for member in self.members:
            member.client.close()
            if member.server is not None:
                member.server.stop()

    def draw(
        self,
        requests: Sequence[Generation],
        accept: Callable[[Member, Sequence[Completion]], bool],
    ) -> list[list[Completion] | None]:
        """Responses in the order of the requests; None where no server was ready.

        Args:
            accept: whether a member's responses come from allowed weights; others are drawn again.
        """
        if not requests or not self.members:
            return [None] * len(requests)
        done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        self._watcher.start()
        num_threads = min(len(requests), _MAX_IN_FLIGHT * len(self.members))
        try:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="draw") as pool:
                return list(pool.map(lambda request: self._answer(request, accept), requests))
        finally:
            done.set()  # not joined: its health probe may take another second
            for name, count in self._redrawn.items():
                self.events.add("redrawn", name, f"{count} responses after a failure", count)
            for name, count in self._retried.items():
                if count > 1:
                    detail = f"{count} requests were repeated in all"
                    self.events.add("retried", name, detail, count - 1)
            self._redrawn.clear()
            self._retried.clear()

    def fail(self, member: Member, reason: str) -> None:
        """Take a member out of use; kill and restart it if it is this run's and restarts are left.

        Without restarts the fleet is lost.
        """
        with self._lock:
            if member.state in ("failed", "restarting"):
                return  # another thread has reported the failure
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
                    f"{member.name} failed and max_restarts is used up: "
                    f"{self.settings.max_restarts} in {RESTART_WINDOW_MINUTES:g} "
                    f"minutes ({reason})"
                )

    def lose(self, reason: str) -> None:
        """Declare that the fleet cannot go on."""
        self.lost = reason
        self.events.add("lost", "fleet", reason)

    def await_restarts(self) -> None:
        """Wait until every restarting member answers and needs weights, or the fleet is lost."""
        for member in self.members:
            while member.state == "restarting" and self.lost is None:
                self._await(member)

    def weights_arrived(self, member: Member) -> None:
        """Make a member ready: it has the current weights, verified."""
        with self._lock:
            if member.state == "needs_weights":
                member.state = "ready"

    def weights_outdated(self, member: Member) -> None:
        """Send a member no request until it has the current weights."""
        with self._lock:
            if member.state == "ready":
                member.state = "needs_weights"

    def release_memory(self) -> None:
        """Colocated: release the GPU memory to the trainer. The weights must be sent again.

        A server that is being restarted is waited for, because it takes its memory as it starts.
        """
        if self._watcher is not None:
            self._watcher.join()  # a server with a queued health probe crashes on release
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

    def _await(self, member: Member) -> None:
        """Wait for one start; after a failed one restart the server or lose the fleet."""
        try:
            if member.server is not None:
                member.server.wait_until_healthy(self.stop_requested)
            else:
                limit = self.settings.startup_timeout_seconds
                defect = await_answer(member.client, limit, self.stop_requested)
                if defect is not None:
                    raise ServerStartError(f"{member.client.url} {defect}")
            check_release(member.client.release(), member.client.url)
            if member.server is None:
                member.tensor = member.client.tensor_ranks()  # may differ after each start
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
            member.state, member.missed_probes = "needs_weights", 0

    def _may_restart(self) -> bool:
        """Whether fewer than max_restarts restarts lie in the window that ends now."""
        begin = time.monotonic() - 60 * RESTART_WINDOW_MINUTES
        while self._restarts and self._restarts[0] < begin:
            self._restarts.popleft()
        return len(self._restarts) < self.settings.max_restarts

    def _restart(self, member: Member, server: SglangServer) -> None:
        server.stop()
        self._restarts.append(time.monotonic())
        detail = f"{len(self._restarts)} of {self.settings.max_restarts}"
        minutes = f"{RESTART_WINDOW_MINUTES:g} minutes"
        self.events.add("restart", member.name, f"{detail} in {minutes}")
        server.start()
        member.state = "restarting"

    def _answer(
        self, request: Generation, accept: Callable[[Member, Sequence[Completion]], bool]
    ) -> list[Completion] | None:
        """Send a request until its responses are accepted; None when no member is ready."""
        while True:
            with self._lock:
                ready = [member for member in self.members if member.state == "ready"]
                member = min(ready, key=lambda member: member.in_flight, default=None)
                if member is None:
                    return None
                member.in_flight += 1
            try:
                answer = self._generate(member, request)
            finally:
                with self._lock:
                    member.in_flight -= 1
            if answer is None:
                with self._lock:
                    self._redrawn[member.name] += request.sampling.num_samples
            elif accept(member, answer):
                self.progress()
                return answer

    def _generate(self, member: Member, request: Generation) -> list[Completion] | None:
        """The member's responses; after transient failures the request is repeated, then it fails.

        A member whose reply stays unusable is taken out of use.
        """
        client, attempt = member.client, 0
        while True:
            attempt += 1
            try:
                return client.generate(request)
            except ServerFailure as failure:
                reason = f"{failure.kind}: {failure.detail}"
                if client is not member.client:
                    return None  # the member failed meanwhile, so this request had to fail
                if attempt == ATTEMPTS or not failure.transient:
                    self.fail(member, reason)
                    return None
                with self._lock:
                    self._retried[member.name] += 1
                    if self._retried[member.name] == 1:
                        self.events.add("retried", member.name, reason)
                time.sleep(pause_seconds(attempt))

    def _watch(self, done: threading.Event) -> None:
        """Probe members while requests are in flight, and fail those that do not answer.

        A probe is not missed while servers of this machine compile kernels.
        """
        interval = self.settings.health_interval_seconds
        compilers = CompilerWatch()
        while not done.wait(interval):
            compiled = compilers.has_compiled()
            for member in self.members:
                if member.state != "ready":
                    continue
                if member.client.is_healthy(timeout_seconds=interval):
                    member.missed_probes = 0
                    continue
                if member.server is not None and compiled:
                    continue
                member.missed_probes += 1
                if member.missed_probes >= _MAX_MISSED_PROBES and not done.is_set():
                    self.fail(member, f"hung: {_MAX_MISSED_PROBES} health probes went unanswered")


def one_per_server(statuses: Sequence[ServerStatus]) -> list[ServerStatus]:
    """One status per server, from those of all leaders that share it.

    A server needs weights if any leader says so. Its lives are added up, so they differ after each
    failure that any leader has seen.
    """
    by_name: dict[str, ServerStatus] = {}
    for other in statuses:
        status = by_name.setdefault(other.name, other)
        if status is not other:
            by_name[other.name] = replace(
                status,
                state=other.state if other.state == "needs_weights" else status.state,
                life=status.life + other.life,
                sender=other.sender if status.sender is None else status.sender,
            )
    return list(by_name.values())
