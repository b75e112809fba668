"""One queue of requests to a fleet's servers: none of them lost or counted twice.

Each response is a request. The one that comes next is of the lowest step, there the first response
to every prompt before the second ones, there the one submitted first. It goes to the ready server
that has the fewest responses in flight and may have one more; a server that has computed its prompt
already is preferred a little. What a failed server was asked for goes back to the queue and to the
others.

`pause` ends what is in flight before weights change: it waits for the servers' last replies, or
aborts their requests and keeps the tokens drawn so far. An aborted response goes on after `resume`
from its tokens, on any server. So a reply's tokens are all of one version of the weights. An abort
reaches only requests that have arrived at the server, so it is repeated until all replies are in.

Replies come in one thread (serving/http_process.py), which never waits: servers are ended and
started again in another. Not here: the servers' states and restarts (fleet.py), which weights are
allowed (engine.py).
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from stable_opd_mcore.metrics import Mean, Metrics, Sum
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.records import Job, Task
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import (
    ATTEMPTS,
    ServerFailure,
    SglangClient,
    pause_seconds,
)
from stable_opd_mcore.serving.requests import Call, Completion

_ABORT_ALL = Call("POST", "/abort_request", {"rid": "", "abort_all": True})
_ABORT_SECONDS = 0.2  # between two aborts of what is still in flight
# A server that has computed the prompt is preferred with up to so many more responses in flight.
_SPARED = 4


class Dispatcher:
    """Sends jobs' requests while it is not paused and members are ready. Safe to use from many
    threads."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._changed = threading.Condition()
        self._queue: list[tuple[tuple[int, int, int], Task]] = []  # a heap
        self._num_jobs = 0
        self._num_running = 0  # requests in flight
        self._is_paused = False
        self._error: BaseException | None = None  # of a request, raised by `wait`
        self._redrawn: Counter[str] = Counter()  # responses to draw again, by the failed member
        self._retried: Counter[str] = Counter()  # requests repeated to the same member
        self._metrics = Metrics()
        self._failures = ThreadPoolExecutor(1, thread_name_prefix="failure")

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue what the jobs' answers lack."""
        self._fleet.watch()
        with self._changed:
            for job in jobs:
                job.number = self._num_jobs
                self._num_jobs += 1
                for sample, answer in enumerate(job.answers):
                    if not answer.is_done:
                        self._push(Task(job, sample))
            self._send()

    def wait(self, jobs: Sequence[Job]) -> None:
        """Return when all are done, or when nothing is in flight and no member is ready.

        Raises:
            RefusedRequest: a server refuses a request.
        """
        missing = list(jobs)

        def are_done() -> bool:
            while missing and missing[-1].is_done:
                missing.pop()
            return not missing

        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._num_running or are_done())
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
            if abort:  # a member that does not answer is left to its health probes
                wait([m.client.submit(_ABORT_ALL, timeouts.QUESTION) for m in busy])
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
        self._failures.shutdown(wait=False)

    def take_metrics(self) -> Metrics:
        """Since the last call."""
        with self._changed:
            taken = Metrics({"engine/prefix_cached_share": Mean(0, 0), "engine/continued": Sum(0)})
            taken, self._metrics = taken | self._metrics, Metrics()
        return taken

    # ---- with the lock held

    def _push(self, task: Task) -> None:
        heapq.heappush(self._queue, (task.rank, task))

    def _send(self) -> None:
        """Send requests in the order of the queue while a ready member may have one more."""
        while self._queue and not self._is_paused:
            members = self._fleet.members
            free = [m for m in members if m.state == "ready" and m.in_flight < m.max_in_flight]
            if not free:
                return
            _, task = heapq.heappop(self._queue)
            known = task.job.member
            member = min(free, key=lambda m: m.in_flight - (_SPARED if m is known else 0))
            task.job.member = known or member
            self._count(member, 1)
            self._request(member, member.client, task, 1)

    def _request(self, member: Member, client: SglangClient, task: Task, attempt: int) -> None:
        delay = 0.0 if attempt == 1 else pause_seconds(attempt - 1)
        reply = client.submit(task.request(), delay_seconds=delay)
        reply.add_done_callback(partial(self._replied, member, client, task, attempt))

    def _count(self, member: Member, change: int) -> None:
        """Note that a request is in flight, or with -1 that it is not any more."""
        member.in_flight += change
        self._num_running += change
        self._fleet.idle.count(member.name, change)

    def _take(self, member: Member, task: Task, piece: Completion) -> None:
        """Extend the job's answer by a reply, and queue what it still lacks."""
        job = task.job
        if not job.accept(member, piece):
            self._push(task)
            return
        self._fleet.progress()
        member.has_answered = True
        before = job.answers[task.sample]
        answer = job.answers[task.sample] = before.extended(piece)
        metrics = Metrics()
        if not before.has_tokens and piece.has_tokens:
            share = Mean(piece.cached_tokens, len(job.request.token_ids))
            metrics = Metrics({"engine/prefix_cached_share": share})
        if not answer.is_done:
            self._push(task)
            metrics = metrics | Metrics({"engine/continued": Sum(answer.has_tokens)})
        elif job.ask is not None:
            job.scores[task.sample] = job.ask(answer.token_ids.tolist())
        self._metrics = self._metrics | metrics

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

    # ---- in the threads of replies and of failures

    def _replied(
        self,
        member: Member,
        client: SglangClient,
        task: Task,
        attempt: int,
        reply: Future[Completion],
    ) -> None:
        with self._changed:
            try:
                failure = self._failure_of(client, reply)
                if failure is None:
                    self._take(member, task, reply.result())
                elif client is not member.client:
                    self._redraw(member, task)  # the member has failed, so this request had to
                elif failure.transient and self._is_paused:
                    self._push(task)
                elif failure.transient and attempt < ATTEMPTS:
                    self._note_retry(member, failure)
                    self._request(member, client, task, attempt + 1)
                    return
                else:
                    self._failures.submit(self._fail, member, client, task, failure)
                    return
            except BaseException as error:  # raised again where the answer is waited for
                self._error = self._error or error
            self._ended(member)

    def _failure_of(self, client: SglangClient, reply: Future[Completion]) -> ServerFailure | None:
        """Why a reply is of no use; other errors are raised."""
        try:
            piece = reply.result()
        except ServerFailure as failure:
            return failure
        if self._is_paused or piece.has_tokens:
            return None
        detail = "before the first token, and not by this run"
        return ServerFailure(client.url, "aborted", detail, transient=True)

    def _fail(
        self, member: Member, client: SglangClient, task: Task, failure: ServerFailure
    ) -> None:
        """Take a member out of use whose replies stay unusable; this may take seconds."""
        try:
            if client is member.client:
                self._fleet.fail(member, f"{failure.kind}: {failure.detail}")
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._redraw(member, task)
            self._ended(member)

    def _redraw(self, member: Member, task: Task) -> None:
        self._redrawn[member.name] += 1
        self._push(task)

    def _note_retry(self, member: Member, failure: ServerFailure) -> None:
        self._retried[member.name] += 1
        if self._retried[member.name] == 1:
            detail = f"{failure.kind}: {failure.detail}"
            self._fleet.events.add("retried", member.name, detail)

    def _ended(self, member: Member) -> None:
        """Note that a request is over, and send others."""
        self._count(member, -1)
        try:
            self._send()
        except BaseException as error:
            self._error = self._error or error
        self._changed.notify_all()
