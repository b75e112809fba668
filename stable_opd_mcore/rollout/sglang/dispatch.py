"""One queue of requests to a fleet's servers: none of them lost or counted twice.

Each turn of an episode is a request. Lower steps are sent first; within a step the later turns of
episodes that have begun, then the first responses to all prompts, then the second ones; among these
in the order of submission. A request goes to a ready server that may have one more: the one with
the fewest requests in flight, or one that has computed its context or prompt already, where
computing it elsewhere would cost more (`_chosen`). Between two turns no request is in flight: the
environment is asked, which may go on over a pause, so a weight update waits for turns, not for
episodes.

`pause` ends what is in flight before weights change: it waits for the servers' last replies, or
aborts their requests and keeps the tokens sampled so far. An aborted response continues after
`resume` from its tokens, on any server. So a reply's tokens are all of one version of the weights.
An abort reaches only requests that have arrived at the server, so it is repeated until all replies
are in. What becomes of a reply:

    reply                                        | what follows
    tokens of allowed weights                    | they extend its turn; if unfinished, it is queued
    tokens of other weights                      | dropped; the response is queued
    failure of a member that has failed already  | the response is queued
    transient failure while paused               | the response is queued
    transient failure, fewer than ATTEMPTS       | the request is sent to the same member again
    any other failure                            | the member fails; the response is queued

Replies come in one thread (serving/http_process.py), which never waits: servers are ended and
started again in another.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

from stable_opd_mcore.metrics import Mean, Metrics, Sum
from stable_opd_mcore.rollout.episodes import Episode, WhatFollows
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.prompt_requests import PromptRequests
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import (
    ATTEMPTS,
    RefusedRequest,
    ServerFailure,
    SglangClient,
    pause_seconds,
)
from stable_opd_mcore.serving.requests import Call, Completion

_ABORT_ALL = Call("POST", "/abort_request", {"rid": "", "abort_all": True})
_ABORT_SECONDS = 0.2  # between two aborts of what is still in flight
# Device of the servers -> the number of tokens whose keys and values a server reads in the time in
# which it computes one token (BENCHMARKS.md). The sizes of dense models of 7B to 32B give 750 to
# 2,600 on H100 and H200. On a CPU 18 to 26 were measured.
_READ_PER_COMPUTED = {"cuda": 1024, "cpu": 24}


class _Sent(NamedTuple):
    """A request in flight, or to be repeated."""

    member: Member
    client: SglangClient  # the member's when it was first sent; a failed member gets another
    prompt: PromptRequests
    sample: int
    attempt: int


class Dispatcher:
    """Sends requests while not paused and members are ready. Safe to use from many threads."""

    def __init__(self, fleet: Fleet, device: str = "cuda") -> None:
        """device: the servers' kind."""
        self._fleet = fleet
        self._read_per_computed = _READ_PER_COMPUTED[device]
        self._changed = threading.Condition()
        self._queue: list[tuple[tuple[int, bool, int, int], PromptRequests]] = []  # a heap
        self._num_submitted = 0
        self._num_running = 0  # requests in flight
        self._num_observing = 0  # episodes whose environment is asked
        self._is_paused = False
        self._replied_tokens = Mean(0, 0)  # a reply's, of all so far
        self._error: BaseException | None = None  # raised by `wait`
        # requests sent again since the last report, by event and member
        self._again: Counter[tuple[str, str]] = Counter()
        self._metrics = Metrics()
        self._failures = ThreadPoolExecutor(1, thread_name_prefix="failure")

    def submit(self, prompts: Sequence[PromptRequests]) -> None:
        """Queue what the prompts' responses lack."""
        self._fleet.watch()
        with self._changed:
            for prompt in prompts:
                prompt.number = self._num_submitted
                self._num_submitted += 1
                for sample, episode in enumerate(prompt.episodes):
                    if not episode.is_ended:
                        self._continue(prompt, sample, episode)
            self._send()

    def wait(self, prompts: Sequence[PromptRequests]) -> None:
        """Return when all are done, or when nothing is in flight and no member is ready. Raises
        RefusedRequest if a server refuses a request, and what an observation raises."""
        missing = list(prompts)

        def are_done() -> bool:
            while missing and missing[-1].is_done:
                missing.pop()
            return not missing

        with self._changed:
            self._changed.wait_for(lambda: self._error or self._is_idle or are_done())
            self._report()
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    @property
    def _is_idle(self) -> bool:
        return not self._num_running and not self._num_observing

    def hold(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._is_paused = True

    def pause(self, *, abort: bool) -> None:
        """Hold, and return when nothing is in flight; `abort` ends it at once."""
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

    def drop(self, prompts: Sequence[PromptRequests]) -> None:
        """Forget these and what is queued; called while paused."""
        with self._changed:
            for prompt in prompts:
                prompt.is_dropped = True
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

    def _enqueue(self, prompt: PromptRequests, sample: int) -> None:
        heapq.heappush(self._queue, (prompt.queue_key(sample), prompt))

    def _send(self) -> None:
        """Send requests in the order of the queue while a ready member may have one more."""
        while self._queue and not self._is_paused:
            members = self._fleet.members
            free = [m for m in members if m.state == "ready" and m.in_flight < m.max_in_flight]
            if not free:
                return
            (_, _, sample, _), prompt = heapq.heappop(self._queue)
            member = self._chosen(free, prompt, sample)
            prompt.members.add(member.name)
            self._count(member, 1)
            try:
                self._request(_Sent(member, member.client, prompt, sample, 1))
            except BaseException:  # a pause would wait for its reply
                self._count(member, -1)
                raise

    def _chosen(self, free: Sequence[Member], prompt: PromptRequests, sample: int) -> Member:
        """The member where a request costs least, counted in requests in flight.

        Computing its context of L tokens again holds up the request and the n in flight there.
        Where d more are in flight than elsewhere, each sampled token costs the requests of both
        servers 2 d times what one more adds: the time to read its context, or to compute a token
        if that is longer.
        """
        length, known = len(prompt.episodes[sample].context), prompt.known_by(sample)
        sampled = self._replied_tokens.value() or prompt.request.sampling.max_new_tokens
        lost = min(length, self._read_per_computed) / sampled / 2
        return min(
            free, key=lambda m: m.in_flight + (0 if m.name in known else lost * (m.in_flight + 1))
        )

    def _request(self, sent: _Sent) -> None:
        delay = 0.0 if sent.attempt == 1 else pause_seconds(sent.attempt - 1)
        request = sent.prompt.next_request(sent.sample, sent.member)
        reply = sent.client.submit(request, delay_seconds=delay)
        reply.add_done_callback(partial(self._replied, sent))

    def _count(self, member: Member, change: int) -> None:
        """Note that a request is in flight, or with -1 that it is not any more."""
        member.in_flight += change
        self._num_running += change
        self._fleet.idle.count(member.name, change)

    def _take(self, sent: _Sent, piece: Completion) -> None:
        """Extend the episode by a reply."""
        prompt, sample = sent.prompt, sent.sample
        if not prompt.accept(sent.member, piece):
            self._enqueue(prompt, sample)
            return
        self._fleet.progress()
        sent.member.has_answered = True
        before, episode = prompt.episodes[sample], prompt.extended(sample, piece)
        if piece.has_tokens:
            prompt.last_members[sample] = sent.member.name
            self._replied_tokens += Mean(len(piece.token_ids), 1)
            if not before.turns[-1].num_tokens:
                share = Mean(piece.cached_tokens, len(before.context))
                self._metrics = self._metrics | Metrics({"engine/prefix_cached_share": share})
        if piece.judgements:
            count = Mean(piece.judgements + piece.accepted_tokens, piece.judgements)
            self._metrics = self._metrics | Metrics({"engine/accepted_tokens_per_step": count})
        if episode.is_open:
            continued = Sum(len(episode.token_ids) > 0)
            self._metrics = self._metrics | Metrics({"engine/continued": continued})
        self._continue(prompt, sample, episode)

    def _continue(self, prompt: PromptRequests, sample: int, episode: Episode) -> None:
        """Queue what a sample's turn lacks, ask what follows it, or note that it has ended."""
        prompt.episodes[sample] = episode
        if episode.is_open:
            self._enqueue(prompt, sample)
        elif episode.awaits_observation:
            self._num_observing += 1
            prompt.observe(episode).add_done_callback(partial(self._observed, prompt, sample))
        elif prompt.ask is not None:
            prompt.scores[sample] = prompt.ask(episode.rollout())

    def _report(self) -> None:
        """Write down what was sent again since the last report."""
        for (event, name), count in self._again.items():
            if event == "redrawn":
                detail = f"{count} responses after a failure"
                self._fleet.events.add("redrawn", name, detail, count)
            elif count > 1:  # the first was written when it happened
                detail = f"{count} requests were repeated in all"
                self._fleet.events.add("retried", name, detail, count - 1)
        self._again.clear()

    # ---- in the threads of observations, replies and failures

    def _observed(self, prompt: PromptRequests, sample: int, answer: Future[WhatFollows]) -> None:
        with self._changed:
            self._num_observing -= 1
            try:
                if not prompt.is_dropped:
                    episode = prompt.episodes[sample].after(answer.result())
                    self._continue(prompt, sample, episode)
                    self._send()
            except BaseException as error:  # raised again where the response is waited for
                self._error = self._error or error
            self._changed.notify_all()

    def _replied(self, sent: _Sent, reply: Future[Completion]) -> None:
        with self._changed:
            try:
                failure = self._failure_of(sent, reply)
                if failure is None:
                    self._take(sent, reply.result())
                elif sent.client is not sent.member.client:  # its member has failed
                    self._sample_again(sent)
                elif failure.transient and self._is_paused:
                    self._enqueue(sent.prompt, sent.sample)
                elif failure.transient and sent.attempt < ATTEMPTS:
                    self._note_retry(sent.member, failure)
                    self._request(sent._replace(attempt=sent.attempt + 1))
                    return
                else:
                    self._failures.submit(self._fail, sent, failure)
                    return
            except BaseException as error:  # raised again where the response is waited for
                self._error = self._error or error
            self._ended(sent.member)

    def _failure_of(self, sent: _Sent, reply: Future[Completion]) -> ServerFailure | None:
        """Why a reply is of no use; other errors are raised."""
        try:
            piece = reply.result()
        except ServerFailure as failure:
            return failure
        except RefusedRequest as refusal:
            if (adapter := sent.member.adapter) is None or adapter not in str(refusal):
                raise
            detail = f"it has lost the adapter, as after a restart: {refusal}"
            return ServerFailure(sent.client.url, "status", detail)
        if self._is_paused or piece.has_tokens:
            return None
        detail = "before the first token, and not by this run"
        return ServerFailure(sent.client.url, "aborted", detail, transient=True)

    def _fail(self, sent: _Sent, failure: ServerFailure) -> None:
        """Take a member out of use whose replies stay unusable; this may take seconds."""
        try:
            if sent.client is sent.member.client:
                self._fleet.fail(sent.member, f"{failure.kind}: {failure.detail}")
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._sample_again(sent)
            self._ended(sent.member)

    def _sample_again(self, sent: _Sent) -> None:
        self._again["redrawn", sent.member.name] += 1
        self._enqueue(sent.prompt, sent.sample)

    def _note_retry(self, member: Member, failure: ServerFailure) -> None:
        self._again["retried", member.name] += 1
        if self._again["retried", member.name] == 1:
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
