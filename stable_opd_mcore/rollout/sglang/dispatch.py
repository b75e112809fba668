"""One queue of requests to a fleet's servers: none of them lost or counted twice.

The request that comes next is the one of the lowest step, there the one whose prompt had the
longest response before, there the one submitted first. It goes to the ready server that has the
fewest tokens in flight and room for it in its cache of keys and values. What a failed server was
asked for goes back to the queue and to the others.

`pause` ends what is in flight before weights change: it waits for the servers' last replies, or
aborts their requests and keeps the tokens drawn so far. An aborted response goes on after `resume`
from its tokens, on any server. So a reply's tokens are all of one version of the weights. An abort
reaches only requests that have arrived at the server, so it is repeated until all replies are in.

Not here: the servers' states and restarts (fleet.py), which weights are allowed (engine.py).
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stable_opd_mcore.host.open_files import require_open_files
from stable_opd_mcore.metrics import Mean, Metrics, Sum
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.records import Job, Task, tasks_of
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import (
    ATTEMPTS,
    RefusedRequest,
    ServerFailure,
    pause_seconds,
)
from stable_opd_mcore.serving.requests import Completion, Generation

_MAX_REQUESTS = 256  # in flight per server, each in a thread and over a connection of its own
_OTHER_FILES = 512  # open in a trainer: devices, libraries, logs, a served teacher's connections
_ABORT_SECONDS = 0.2  # between two aborts of what is still in flight


class Dispatcher:
    """Sends jobs' requests while it is not paused and members are ready. Safe to use from many
    threads.

    Raises:
        UserError: this process may not open as many files as it may have connections.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._changed = threading.Condition()
        self._queue: list[tuple[tuple[int, int, int, int], Task]] = []  # a heap
        self._num_jobs = 0
        self._num_running = 0  # requests in flight
        self._is_paused = False
        self._error: BaseException | None = None  # of a request, raised by `wait`
        self._redrawn: Counter[str] = Counter()  # responses to draw again, by the failed member
        self._retried: Counter[str] = Counter()  # requests repeated to the same member
        self._lengths = (0, 0)  # tokens and number of the responses that have ended
        self._metrics = Metrics()
        threads = (_MAX_REQUESTS + 1) * max(1, len(fleet.members))  # one each sends aborts
        require_open_files(threads + _OTHER_FILES, f"{len(fleet.members)} servers' requests")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="draw")

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue what the jobs' answers lack."""
        self._fleet.watch()
        with self._changed:
            for job in jobs:
                job.number = self._num_jobs
                self._num_jobs += 1
                self._push(tasks_of(job))
            self._send()

    def wait(self, jobs: Sequence[Job]) -> None:
        """Return when all are done, or when nothing is in flight and no member is ready.

        Raises:
            RefusedRequest: a server refuses a request.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not self._num_running or all(job.is_done for job in jobs)
            )
            self._report()
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def hold(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._is_paused = True

    def pause(self, *, abort: bool) -> None:
        """Hold, and return when nothing is in flight.

        Args:
            abort: end what is in flight at once; else it is waited for.
        """
        self.hold()
        while True:
            busy = [m for m in self._fleet.members if m.in_flight and m.state == "ready"]
            if abort:
                list(self._pool.map(_abort_all, busy))
            with self._changed:
                limit = _ABORT_SECONDS if abort else None
                if self._changed.wait_for(lambda: not self._num_running, limit):
                    self._report()
                    return

    def resume(self) -> None:
        with self._changed:
            self._is_paused = False
            self._send()

    def clear(self) -> None:
        """Forget what is queued; called while paused."""
        self._queue.clear()

    def close(self) -> None:
        """Send nothing more. What is in flight fails when the members' clients are closed."""
        self.hold()
        self._pool.shutdown(wait=False)

    def take_metrics(self) -> Metrics:
        """Since the last call."""
        with self._changed:
            taken = Metrics({"engine/prefix_cached_share": Mean(0, 0), "engine/continued": Sum(0)})
            taken, self._metrics = taken | self._metrics, Metrics()
        return taken

    # ---- with the lock held

    def _push(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            heapq.heappush(self._queue, (task.rank, task))

    def _send(self) -> None:
        """Send requests in the order of the queue while a ready member has room for the next."""
        while self._queue and not self._is_paused:
            task = self._queue[0][1]
            tokens, number = self._lengths
            longest = task.job.request.sampling.max_new_tokens
            size = task.num_tokens(tokens // number + 1 if number else longest)
            ready = [m for m in self._fleet.members if m.state == "ready"]
            free = [m for m in ready if has_room(m, len(task.samples), size)]
            member = min(free, key=lambda member: member.tokens_in_flight, default=None)
            if member is None:
                return
            heapq.heappop(self._queue)
            self._count(member, task, size, 1)
            self._pool.submit(self._serve, member, task, size)

    def _count(self, member: Member, task: Task, size: int, sign: int) -> None:
        """Note that a request is in flight, or with -1 that it is not any more."""
        member.in_flight += sign
        member.responses_in_flight += sign * len(task.samples)
        member.tokens_in_flight += sign * size
        self._num_running += sign
        self._fleet.idle.count(member.name, sign)

    def _take(self, member: Member, task: Task, pieces: list[Completion] | None) -> None:
        """Extend the job's answers by a reply, and queue what they still lack."""
        job = task.job
        if pieces is None or not job.accept(member, pieces):
            if pieces is None:
                self._redrawn[member.name] += len(task.samples)
            self._push([task])
            return
        self._fleet.progress()
        member.has_answered = True
        if not job.answers[task.samples[0]].token_ids:
            prompt = len(job.request.token_ids) * sum(len(piece.token_ids) > 0 for piece in pieces)
            cached = Mean(sum(piece.cached_tokens for piece in pieces), prompt)
            self._metrics = self._metrics | Metrics({"engine/prefix_cached_share": cached})
        continued = 0
        for sample, piece in zip(task.samples, pieces, strict=True):
            answer = job.answers[sample] = job.answers[sample].extended(piece)
            if answer.is_done:
                tokens, number = self._lengths
                self._lengths = tokens + len(answer.token_ids), number + 1
                if job.ask is not None:
                    job.scores[sample] = job.ask(answer.token_ids)
            else:
                continued += bool(answer.token_ids)
        left = {answer for answer in task.samples if not job.answers[answer].is_done}
        self._push([one for one in tasks_of(job) if left.issuperset(one.samples)])
        self._metrics = self._metrics | Metrics({"engine/continued": Sum(continued)})

    def _report(self) -> None:
        """Write down what was drawn again or repeated since the last report."""
        events = self._fleet.events
        for name, count in self._redrawn.items():
            events.add("redrawn", name, f"{count} responses after a failure", count)
        for name, count in self._retried.items():
            if count > 1:
                detail = f"{count} requests were repeated in all"
                events.add("retried", name, detail, count - 1)
        self._redrawn.clear()
        self._retried.clear()

    # ---- in a worker thread

    def _serve(self, member: Member, task: Task, size: int) -> None:
        pieces, error = None, None
        try:
            pieces = self._generate(member, task.request())
        except BaseException as raised:  # raised again where the answer is waited for
            error = raised
        with self._changed:
            self._count(member, task, size, -1)
            try:
                if error is None:
                    self._take(member, task, pieces)
                self._send()
            except BaseException as raised:
                error = raised
            self._error = self._error or error
            self._changed.notify_all()

    def _generate(self, member: Member, request: Generation) -> list[Completion] | None:
        """The member's responses; after transient failures the request is repeated, then it fails.

        A member whose reply stays unusable is taken out of use.
        """
        client, attempt = member.client, 0
        while True:
            attempt += 1
            try:
                pieces = client.generate(request)
                if not self._is_paused and not any(len(piece.token_ids) for piece in pieces):
                    detail = "before the first token, and not by this run"
                    raise ServerFailure(client.url, "aborted", detail, transient=True)
                return pieces
            except ServerFailure as failure:
                reason = f"{failure.kind}: {failure.detail}"
                if client is not member.client:
                    return None  # the member failed meanwhile, so this request had to fail
                if attempt == ATTEMPTS or not failure.transient:
                    self._fleet.fail(member, reason)
                    return None
                with self._changed:
                    self._retried[member.name] += 1
                    if self._retried[member.name] == 1:
                        self._fleet.events.add("retried", member.name, reason)
                time.sleep(pause_seconds(attempt))


def has_room(member: Member, num_responses: int, num_tokens: int) -> bool:
    """Whether the member's cache holds another request; a member without any always has room."""
    responses = member.responses_in_flight + num_responses
    tokens = member.tokens_in_flight + num_tokens
    within = responses <= member.max_responses and tokens <= member.max_tokens
    return not member.in_flight or (within and member.in_flight < _MAX_REQUESTS)


def _abort_all(member: Member) -> None:
    """End the member's requests. A member that does not answer is left to its health probes."""
    body = {"rid": "", "abort_all": True}
    with contextlib.suppress(ServerFailure, RefusedRequest):
        member.client.call("POST", "/abort_request", body, timeouts.QUESTION)
