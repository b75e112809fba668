"""A teacher on SGLang servers, of any architecture that SGLang supports. It is asked about one
sample at a time, while other responses are still sampled.

    reply = teacher.ask(sample, step)  # any thread may ask
    (scores,) = teacher.wait([reply])

Scores are of the softmax at temperature 1 (SGLang scores prompts at no other), so rollouts must be
sampled at 1. SGLang normalises over all rows of the output head, with those beyond the tokenizer's
vocabulary; a teacher with probability there is refused at the start.

A request waits while _MAX_IN_FLIGHT others are in flight. What its reply does:

    scores   | the request is answered
    refusal  | the teacher is lost
    failure  | the next replica is asked, after a pause once each has failed; but the teacher is
             | lost if each has failed, somebody waits, and none of them has answered anything for
             | `patience_seconds`

A lost teacher answers nothing more: `wait` returns None, the futures raise TeacherLost.

Letters: L tokens that are scored, K entries of a top-K list.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.models import TeacherConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Sample, Sampling, SequenceScores
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.api_key import read_api_key
from stable_opd_mcore.serving.client import (
    RefusedRequest,
    ServerFailure,
    SglangClient,
    pause_seconds,
)
from stable_opd_mcore.serving.idle_clock import IdleClock
from stable_opd_mcore.serving.requests import Completion, Generation, Request, Scoring

_MAX_IN_FLIGHT = 64  # a rank's requests: the time-out counts while a request waits in a server
_SELF_TEST_TOP_K = 8
_SELF_TEST_TOLERANCE = 1e-3  # log-probabilities, and probability outside the vocabulary
_ANY = ""  # the only route of a teacher for all sources
_log = logging.getLogger(__name__)


class TeacherLost(UserError):
    """No replica of a teacher answers. Raised before the step changes anything."""


@dataclass(frozen=True)
class Wanted:
    """What is asked about every token, in addition to its log-probability."""

    top_k: int = 0  # the most probable tokens
    extra_ids: tuple[int, ...] = ()  # the log-probabilities of these ids


@dataclass(eq=False)
class _Asked:
    """A request until it is answered."""

    route: str
    clients: Sequence[SglangClient]  # tried in this order
    request: Request[Any]
    selected: NDArray[np.int32] | None = None  # which of the scores are the answer; None: all
    failures: int = 0
    reply: Future[Any] = field(default_factory=Future)


@dataclass(eq=False)
class ServedTeacher:
    """The teacher's replicas, or those of several teachers, each for some sources of prompts.

    Raises:
        UserError: a temperature other than 1, or no key in `api_key_file`.
    """

    settings: TeacherConfig
    _: KW_ONLY
    vocab_size: int  # the common vocabulary of student and teacher
    temperature: float  # the rollouts'; must be 1
    wanted: Callable[[int], Wanted] = lambda _: Wanted()  # gets the step, see `ask`
    # source of a prompt -> the key of its teacher in teacher.routes; not read without routes
    route_of: Mapping[str, str] = field(default_factory=dict[str, str])
    stop_ids: tuple[int, ...] = ()  # that end its own turns
    patience_seconds: float = timeouts.TEACHER_PATIENCE
    progress: Callable[[], None] = lambda: None  # called from other threads after each answer

    def __post_init__(self) -> None:
        if self.temperature != 1.0:
            raise UserError(
                "a served teacher scores at temperature 1, rollouts are sampled at "
                f"{self.temperature}: their log-probabilities are not comparable; set "
                "sampling.temperature=1, or teacher.engine=megatron, which scores at any "
                "temperature"
            )
        settings = self.settings
        routes = {_ANY: settings.urls} if settings.urls else settings.routes
        api_key = read_api_key(settings.api_key_file)
        self._clients = {
            route: [SglangClient(url, api_key=api_key) for url in urls]
            for route, urls in routes.items()
        }
        self._urls = [url for urls in routes.values() for url in urls]
        self.idle = IdleClock(self._urls)
        self.lost: str | None = None  # why no replica answers any more
        self._turn = itertools.count()
        self._lock = threading.RLock()  # protects all that follows
        self._waiting: deque[_Asked] = deque()  # not sent yet
        self._num_in_flight = 0
        self._waits_since: float | None = None  # time.monotonic(); None: nobody waits
        self._answered: defaultdict[str, float] = defaultdict(float)  # the same, by route
        self._failing: set[str] = set()  # addresses of the replicas that the log has reported

    def ask(self, sample: Sample, step: int) -> Future[SequenceScores]:
        """Begin to score the sampled tokens of a sample, and do not wait. From any thread.

        The teacher of its prompt's source reads the whole sequence, after the teacher's prompt if
        it has one.
        """
        route = self._route(sample.prompt_id)
        sequence, start = sample.token_ids, sample.num_prompt_tokens
        selected = sample.places - start
        if sample.teacher_prompt_token_ids is not None:
            sequence = np.concatenate([sample.teacher_prompt_token_ids, sequence[start:]])
            start = len(sample.teacher_prompt_token_ids)
        start = min(start, len(sequence) - 1)  # a request without a token to score is refused
        wanted = self.wanted(step)
        request = Scoring(sequence, start, self.vocab_size, wanted.top_k, wanted.extra_ids)
        return self._submit(route, self._clients[route], request, selected)

    def play(
        self, prompt_id: str, token_ids: Sequence[int], sampling: Sampling
    ) -> Future[Completion]:
        """Begin to sample a turn of the teacher's after these tokens. From any thread."""
        route = self._route(prompt_id)
        return self._submit(
            route, self._clients[route], Generation(token_ids, sampling, self.vocab_size)
        )

    def _route(self, prompt_id: str) -> str:
        """The key of the teacher of a prompt's source."""
        source = prompt_id.rpartition(":")[0]
        return _ANY if _ANY in self._clients else self.route_of.get(source, source)

    def wait(self, replies: Sequence[Future[SequenceScores]]) -> list[SequenceScores | None]:
        """The scores, when all are there; when the teacher is lost meanwhile, some are None."""
        self._waits_since = time.monotonic()
        try:
            wait_for(replies, return_when=FIRST_EXCEPTION)
        finally:
            self._waits_since = None
        lost = [not reply.done() or isinstance(reply.exception(), TeacherLost) for reply in replies]
        return [None if is_lost else r.result() for r, is_lost in zip(replies, lost, strict=True)]

    def close(self) -> None:
        """Ask for nothing more. Requests in flight fail."""
        self.lost = self.lost or "the run ends"
        for client in itertools.chain(*self._clients.values()):
            client.close()

    def self_test(self, token_ids: Sequence[int]) -> float:
        """Score one sequence twice on every replica; returns the largest difference of a
        log-probability from the first reply of its route.

        Raises:
            UserError: the difference exceeds the tolerance, or the teacher has probability beyond
                the common vocabulary.
            TeacherLost: a replica does not answer.
        """
        top_k = min(_SELF_TEST_TOP_K, self.vocab_size)
        request = Scoring(tuple(token_ids), 1, self.vocab_size, top_k, any_top_id=True)
        largest = 0.0
        for route, clients in self._clients.items():
            first: SequenceScores | None = None
            for client in [client for client in clients for _ in range(2)]:
                (scores,) = self.wait([self._submit(route, [client], request)])
                if scores is None:
                    raise TeacherLost(str(self.lost))
                first = first or scores
                self._require_within_vocabulary(client.url, scores)
                difference = float(np.abs(first.logprobs_L - scores.logprobs_L).max())
                largest = max(largest, difference)
                if difference > _SELF_TEST_TOLERANCE:
                    raise UserError(
                        f"teacher {route or 'urls'}: scores of {client.url} differ by "
                        f"{difference:.3g} from those of {clients[0].url} (allowed "
                        f"{_SELF_TEST_TOLERANCE:g}): other weights, another precision, or a server "
                        "that is not deterministic; serve the same model in the same way everywhere"
                    )
        self.idle = IdleClock(self._urls)  # a test does not belong to a step
        return largest

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """The log-probabilities [L - 1] of each sequence's tokens after the first, by the first
        replica of a teacher of all sources. Raises TeacherLost."""
        requests = [Scoring(tuple(ids), 1, self.vocab_size) for ids in sequences]
        clients = self._clients[_ANY][:1]
        found = self.wait([self._submit(_ANY, clients, request) for request in requests])
        self.idle = IdleClock(self._urls)  # a test does not belong to a step
        if any(scores is None for scores in found):
            raise TeacherLost(str(self.lost))
        return [scores.logprobs_L for scores in found if scores is not None]

    @property
    def first_replica(self) -> SglangClient:
        """The first replica of a teacher of all sources."""
        return self._clients[_ANY][0]

    def _require_within_vocabulary(self, url: str, scores: SequenceScores) -> None:
        probabilities_LK = np.exp(scores.top_logprobs_LK.astype(np.float32))
        beyond_LK = np.where(scores.top_ids_LK >= self.vocab_size, probabilities_LK, 0.0)
        beyond = float(beyond_LK.sum(axis=1).max())
        if beyond > _SELF_TEST_TOLERANCE:
            raise UserError(
                f"teacher {url} gives {beyond:.3g} of its probability to token ids from "
                f"{self.vocab_size} on, which are not in the common vocabulary (allowed "
                f"{_SELF_TEST_TOLERANCE:g}): random weights, or another tokenizer's model; serve "
                "the right one, or set teacher.engine=megatron, which ignores such ids"
            )

    # ---- sending, in any thread

    def _submit(
        self,
        route: str,
        clients: Sequence[SglangClient],
        request: Request[Any],
        selected: NDArray[np.int32] | None = None,
    ) -> Future[Any]:
        first = next(self._turn) % len(clients)
        asked = _Asked(route, [*clients[first:], *clients[:first]], request, selected)
        with self._lock:
            self._waiting.append(asked)
            self._send_next()
        return asked.reply

    def _send_next(self) -> None:
        """Send what waits while there is room; called with the lock held."""
        while self._waiting and self._num_in_flight < _MAX_IN_FLIGHT:
            asked = self._waiting.popleft()
            self._num_in_flight += 1
            try:
                if self.lost is not None:
                    raise TeacherLost(self.lost)
                self._send(asked)
            except Exception as error:  # raised again by `wait`
                self._num_in_flight -= 1
                asked.reply.set_exception(error)

    def _send(self, asked: _Asked, delay_seconds: float = 0.0) -> None:
        client = asked.clients[asked.failures % len(asked.clients)]
        seconds = timeouts.SCORE if isinstance(asked.request, Scoring) else None
        sent = client.submit(asked.request, seconds, delay_seconds)
        self.idle.count(client.url, 1)
        sent.add_done_callback(partial(self._receive, asked, client))

    # ---- receiving, in the thread that reads replies

    def _receive(self, asked: _Asked, client: SglangClient, sent: Future[Any]) -> None:
        self.idle.count(client.url, -1)
        with self._lock:
            try:
                failure = sent.exception()
                if isinstance(failure, ServerFailure):
                    asked.failures += 1
                    self._note(asked, failure)
                    if self.lost is None:
                        rounds, others = divmod(asked.failures, len(asked.clients))
                        self._send(asked, delay_seconds=0.0 if others else pause_seconds(rounds))
                        return
                    raise TeacherLost(self.lost)
                if isinstance(failure, RefusedRequest):  # asking again cannot help
                    self.lost = self.lost or str(failure)
                    raise TeacherLost(self.lost)
                scores = sent.result()
                self._answered[asked.route] = time.monotonic()
                self._failing.discard(client.url)
                self.progress()
                selected = asked.selected
                asked.reply.set_result(scores if selected is None else scores.select(selected))
            except BaseException as error:  # raised again by `wait`
                asked.reply.set_exception(error)
            self._num_in_flight -= 1
            self._send_next()

    def _note(self, asked: _Asked, failure: ServerFailure) -> None:
        """Log a failure; it may lose the teacher."""
        if self.lost is None and failure.url not in self._failing:
            self._failing.add(failure.url)
            _log.warning("teacher: %s; its requests are repeated until one is answered", failure)
        if self._waits_since is None or asked.failures < len(asked.clients):
            return
        silent_since = max(self._waits_since, self._answered[asked.route])
        if time.monotonic() - silent_since > self.patience_seconds:
            waited = f"no teacher answered for {self.patience_seconds:.0f} s"
            self.lost = self.lost or f"{waited}: {failure}; restart its servers, then the run"
