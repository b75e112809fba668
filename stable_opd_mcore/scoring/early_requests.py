"""Requests to a served teacher that are sent while other responses are still drawn.

The rank that drew a response asks for its scores as soon as it is finished. Another rank may train
on it (train/samples/sharing.py), so `take` brings each reply to the rank that needs it: no request
is sent twice. A request that failed is asked for again by the rank that needs it, and so are those
that are not sent yet when `take` waits: of a lost teacher, only what is in flight is waited for.

Of the requests that wait, one of the lowest step is sent first. Bounded: `_MAX_IN_FLIGHT` requests
at a time, and `_MAX_BYTES` for requests and replies that nobody has taken; what exceeds this is not
asked for early. Not here: what is asked, and which server (served_teacher.py).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.parallel.world import exchange_objects, gather_objects
from stable_opd_mcore.serving.requests import SequenceScores

_MAX_IN_FLIGHT = 64
_MAX_BYTES = 4 * 2**30
_log = logging.getLogger("stable_opd_mcore.scoring")


@dataclass(frozen=True, order=True)
class _Request:
    step: int
    number: int  # in the order in which they were asked
    key: bytes = field(compare=False)
    size: int = field(compare=False)  # bytes of the request and of its reply
    send: Callable[[], SequenceScores] = field(compare=False)
    reply: Future[SequenceScores] = field(compare=False, default_factory=Future)


class EarlyRequests:
    """The requests that this rank has sent early, by key. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[bytes, _Request] = {}  # that nobody has taken
        self._waiting: list[_Request] = []  # a heap
        self._numbers = itertools.count()
        self._metrics = Metrics()
        self._pool = ThreadPoolExecutor(_MAX_IN_FLIGHT, thread_name_prefix="early")

    def ask(
        self, key: bytes, send: Callable[[], SequenceScores], *, size_bytes: int, step: int
    ) -> None:
        """Call `send` in a thread. Does nothing if the same was asked, or without room for it.

        Args:
            key: equal keys are equal requests, on all ranks.
            size_bytes: of the request and of its reply.
            step: that trains on the response.
        """
        with self._lock:
            held = sum(request.size for request in self._asked.values())
            if key in self._asked or held + size_bytes > _MAX_BYTES:
                return
            request = _Request(step, next(self._numbers), key, size_bytes, send)
            self._asked[key] = request
            heapq.heappush(self._waiting, request)
        self._pool.submit(self._send_next)

    def take(self, needed: Sequence[bytes]) -> dict[bytes, SequenceScores]:
        """The replies to those of the needed requests that some rank has asked for early, when they
        are there; without those that failed, and without those that a failure on the same rank
        finds not sent. Collective over all ranks.
        """
        wanted = [set(keys) for keys in gather_objects(list(needed))]
        with self._lock:
            asked = {key: self._asked[key] for key in set().union(*wanted) if key in self._asked}
        there = {key for key, request in asked.items() if request.reply.done()}

        def leave_the_rest(reply: Future[SequenceScores]) -> None:
            if not reply.cancelled() and reply.exception() is not None:
                for request in asked.values():
                    request.reply.cancel()  # does nothing once it is sent

        for request in asked.values():
            request.reply.add_done_callback(leave_the_rest)
        replies: dict[bytes, tuple[SequenceScores, bool]] = {}
        for key, request in asked.items():
            with contextlib.suppress(CancelledError):
                if request.reply.exception() is None:  # waits for the reply
                    replies[key] = (request.reply.result(), key in there)
        with self._lock:
            for key in asked:
                del self._asked[key]
        outgoing = [{key: replies[key] for key in keys & replies.keys()} for keys in wanted]
        found = {key: reply for part in exchange_objects(outgoing) for key, reply in part.items()}
        num_early = sum(key in found and found[key][1] for key in needed)
        shares = Metrics({"perf/scored_early": Mean(num_early, len(needed))} if needed else {})
        self._metrics = self._metrics | shares
        return {key: scores for key, (scores, _) in found.items()}

    def forget(self, before_step: float = math.inf) -> None:
        """Drop what was asked for steps before this one; their responses are not trained on."""
        with self._lock:
            for key, request in list(self._asked.items()):
                if request.step < before_step:
                    request.reply.cancel()  # it is not sent if it waits
                    del self._asked[key]

    def take_metrics(self) -> Metrics:
        """This rank's metrics since the last call; the caller reduces them over ranks."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def close(self) -> None:
        """Send nothing more."""
        self.forget()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send_next(self) -> None:
        with self._lock:
            request = heapq.heappop(self._waiting)
        if not request.reply.set_running_or_notify_cancel():
            return
        try:
            request.reply.set_result(request.send())
        except BaseException as error:  # raised again where the caller repeats the request
            if self._asked.get(request.key) is request:
                _log.warning("teacher: %s; the request is repeated when its step is scored", error)
            request.reply.set_exception(error)
