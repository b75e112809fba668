"""One data-parallel rank's servers: many requests in flight, and no failure that loses or doubles
one.

A request goes to the ready server with the fewest in flight. When a server fails, it is taken
out, an owned one is killed and started again at once (it boots while the others work), and its
requests go to those that remain. A request counts when its answer was accepted, once; what is
left when no server is ready comes back as None.

A member's life: restarting -> needs_weights -> ready -> failed -> restarting ... Only
`weights_arrived` makes one ready. Not here: how weights get there (sync.py), and agreement
between ranks (engine.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stable_opd_mcore.rollout.sglang.events import EventLog
from stable_opd_mcore.serving.client import (
    Completion,
    Generation,
    RefusedRequest,
    ServerFailure,
    SglangClient,
)
from stable_opd_mcore.serving.process import (
    ServerStartError,
    SglangServer,
    UnsupportedRelease,
    require_release,
)

_MOST_IN_FLIGHT = 256  # per server; the server batches and queues them itself
_MISSED_PROBES = 2


@dataclass
class Member:
    """One server and what is known of it."""

    name: str
    client: SglangClient
    server: SglangServer | None  # None: somebody else's
    tensor: int = 1  # its tensor-parallel ranks; somebody else's server is asked
    state: str = "restarting"  # restarting | needs_weights | ready | failed
    in_flight: int = 0
    missed_probes: int = 0
    life: int = 0  # one more after every failure
    released: bool = False  # its GPU memory is the trainer's for now

    def reconnect(self) -> None:
        """Those in flight fail; later requests use new connections."""
        self.client.close()
        self.client = self.client.copy()
        self.life += 1
        self.released = False


class Fleet:
    """Draws responses from its members until each request is answered or no member is left."""

    def __init__(
        self,
        members: Sequence[Member],
        events: EventLog,
        *,
        max_restarts: int,
        health_interval_seconds: float,
        startup_timeout_seconds: float,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.members = list(members)
        self.lost: str | None = None  # why there is no going on
        self._events = events
        self._restarts_left = max_restarts
        self._health_interval = health_interval_seconds
        self._startup_timeout = startup_timeout_seconds
        self._stop_asked = stop_asked  # then no member is waited for: it may be ending as well
        self._redrawn: Counter[str] = Counter()  # responses to ask for again, by who failed
        self._watcher: threading.Thread | None = None  # of the newest draw
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start the owned servers, all at once, and wait for every member."""
        for member in self.members:
            if member.server is not None:
                member.server.start()
        self.await_restarts()

    def stop(self) -> None:
        """End the owned servers; leave the others alone."""
        for member in self.members:
            member.client.close()
            if member.server is not None:
                member.server.stop()

    def draw(
        self,
        requests: Sequence[Generation],
        accept: Callable[[Member, Sequence[Completion]], bool],
    ) -> list[list[Completion] | None]:
        """Answers in the order of the requests; None where no server was left to ask.

        `accept` judges an answer's weights; a refused one is drawn again elsewhere.
        """
        answers: list[list[Completion] | None] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        num_threads = min(len(requests), _MOST_IN_FLIGHT * len(self.members))
        if not num_threads:
            return answers
        done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        self._watcher.start()
        try:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="draw") as pool:
                workers = [
                    pool.submit(self._work, requests, waiting, answers, accept)
                    for _ in range(num_threads)
                ]
                for worker in workers:
                    worker.result()
        finally:
            done.set()  # not joined: a probe takes a second, and its verdict no longer counts
            for name, count in self._redrawn.items():
                self._events.add("redrawn", name, f"{count} responses after a failure", count)
            self._redrawn.clear()
        return answers

    def fail(self, member: Member, reason: str) -> None:
        """Take a member out; an owned one is killed and started again while restarts are left."""
        with self._lock:
            if member.state in ("failed", "restarting"):
                return  # another thread was first
            member.state = "failed"
            self._events.add("failure", member.name, reason)
            member.reconnect()
            if member.server is None:
                member.state = "restarting"  # by its owner, we hope
            elif self._restarts_left > 0:
                self._restart(member, member.server)
            else:
                member.server.kill()
                self.lose(f"{member.name} failed and max_restarts is used up ({reason})")

    def await_restarts(self) -> None:
        """Wait until every restarting member answers; it then needs weights. Gives up where it
        must.
        """
        for member in self.members:
            while member.state == "restarting" and self.lost is None:
                self._await(member)

    def weights_arrived(self, member: Member) -> None:
        """The member has the current weights, verified."""
        with self._lock:
            if member.state == "needs_weights":
                member.state = "ready"

    def weights_outdated(self, member: Member) -> None:
        """The member must not be asked until it has the current weights."""
        with self._lock:
            if member.state == "ready":
                member.state = "needs_weights"

    def release_memory(self) -> None:
        """Colocated: give the GPUs to the trainer. The weights are gone and are sent again."""
        if self._watcher is not None:
            self._watcher.join()  # a server with a probe in its queue does not survive this
        for member in self.members:
            if member.state == "ready":
                self.weights_outdated(member)
                self._memory(member, "release_memory_occupation", ["kv_cache", "weights"])
                member.released = True

    def resume_memory(self) -> None:
        """Take back what was released. Harmless where nothing was."""
        for member in self.members:
            if member.released:
                member.released = False
                self._memory(member, "resume_memory_occupation", ["weights", "kv_cache"])

    def _memory(self, member: Member, route: str, tags: list[str]) -> None:
        try:
            member.client.call("POST", f"/{route}", {"tags": tags}, timeout_seconds=120.0)
        except (ServerFailure, RefusedRequest) as error:
            self.fail(member, str(error))

    def _await(self, member: Member) -> None:
        try:
            if member.server is not None:
                member.server.wait_until_healthy(self._stop_asked)
            else:
                self._await_external(member)
            require_release(member.client)
            if member.server is None:
                member.tensor = member.client.tensor_ranks()  # its owner's choice, at every start
        except (ServerStartError, ServerFailure, RefusedRequest) as error:
            with self._lock:
                self._events.add("failure", member.name, f"did not start: {error}")
                hopeless = isinstance(error, UnsupportedRelease) or self._stop_asked()
                if member.server is not None and self._restarts_left > 0 and not hopeless:
                    self._restart(member, member.server)
                else:
                    self.lose(f"{member.name} does not start: {error}")
            return
        with self._lock:
            member.state, member.missed_probes = "needs_weights", 0

    def _await_external(self, member: Member) -> None:
        deadline = time.monotonic() + self._startup_timeout
        while not member.client.is_healthy(timeout_seconds=10.0):
            if self._stop_asked():
                raise ServerStartError(f"asked to stop while {member.client.url} did not answer")
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"no answer from {member.client.url} in {self._startup_timeout:.0f} s"
                )
            time.sleep(1.0)

    def _restart(self, member: Member, server: SglangServer) -> None:
        server.kill()
        self._restarts_left -= 1
        self._events.add("restart", member.name, f"{self._restarts_left} restarts left")
        server.start()
        member.state = "restarting"

    def lose(self, reason: str) -> None:
        """There is no going on."""
        self.lost = reason
        self._events.add("lost", "fleet", reason)

    def _work(
        self,
        requests: Sequence[Generation],
        waiting: deque[int],
        answers: list[list[Completion] | None],
        accept: Callable[[Member, Sequence[Completion]], bool],
    ) -> None:
        """One of many: take a request, a member, ask; until nothing waits or no member is ready."""
        while True:
            with self._lock:
                member = self._least_loaded()
                if not waiting or member is None:
                    return
                index = waiting.popleft()
                member.in_flight += 1
            try:
                answer = member.client.generate(requests[index])
            except ServerFailure as failure:
                self.fail(member, f"{failure.kind}: {failure.detail}")
                answer = None
            finally:
                with self._lock:
                    member.in_flight -= 1
            if answer is not None and accept(member, answer):
                answers[index] = answer
                continue
            with self._lock:
                waiting.append(index)
                if answer is None:
                    self._redrawn[member.name] += requests[index].num_samples

    def _least_loaded(self) -> Member | None:
        ready = [member for member in self.members if member.state == "ready"]
        return min(ready, key=lambda member: member.in_flight, default=None)

    def _watch(self, done: threading.Event) -> None:
        """Probe members while requests are in flight: one that stops answering is hung."""
        while not done.wait(self._health_interval):
            for member in self.members:
                if member.state != "ready":
                    continue
                if member.client.is_healthy(timeout_seconds=self._health_interval):
                    member.missed_probes = 0
                    continue
                member.missed_probes += 1
                if member.missed_probes >= _MISSED_PROBES and not done.is_set():
                    self.fail(member, f"hung: {_MISSED_PROBES} health probes went unanswered")
