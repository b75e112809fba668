"""A scorer over HTTP: a teacher on SGLang servers, of any architecture that SGLang supports.

Scores are of the softmax at temperature 1 (SGLang scores prompts at no other), so rollouts must be
drawn at 1. SGLang normalises over all rows of the output head, with those beyond the tokenizer's
vocabulary; a teacher with probability there is refused at the start. HTTP carries no hidden states,
so objectives over the full vocabulary need a Megatron teacher (megatron.py).

The last pipeline stage's first tensor rank sends the requests that were not sent early
(early_requests.py) and broadcasts the scores to the other tensor ranks. After a failure the next
replica of the teacher is tried; when all have failed, they are tried again until `patience_seconds`
have passed. The first request that then has no scores ends all others. An early request tries each
replica once. To try all of them takes two time-outs at most, however many they are: each attempt
may take one as long as every replica after it keeps its share of the second.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stable_opd_mcore.config.models import TEACHER_PATIENCE, TeacherConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.parallel.world import World, gather_objects
from stable_opd_mcore.records import MicroBatch, Sample, Scores
from stable_opd_mcore.scoring.early_requests import EarlyRequests
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.serving.api_key import read_api_key
from stable_opd_mcore.serving.client import (
    RefusedRequest,
    ServerFailure,
    SglangClient,
    pause_seconds,
)
from stable_opd_mcore.serving.idle_clock import IdleClock
from stable_opd_mcore.serving.requests import Scoring, SequenceScores

_MAX_IN_FLIGHT = 64
_SELF_TEST_TOP_K = 8
_SELF_TEST_TOLERANCE = 1e-3  # of log-probabilities, and of probability outside the vocabulary
_ANY = ""  # the only route of a teacher for all sources
_log = logging.getLogger("stable_opd_mcore.scoring")


class TeacherLost(UserError):
    """No replica of a teacher answers. Raised before the step changes anything."""


@dataclass(eq=False)
class ServedTeacher(Scorer):
    """A `Scorer` over HTTP.

    Raises:
        UserError: a temperature other than 1, no key in `api_key_file`, or a top-K list longer than
            the vocabulary.
    """

    settings: TeacherConfig
    world: World
    _: KW_ONLY
    vocab_size: int  # the common vocabulary of student and teacher
    temperature: float  # of the rollouts; must be 1
    stop_ids: tuple[int, ...] = ()  # scored together, as one outcome (docs/method.md §4)
    top_k: int | None = None  # also score the K most probable tokens
    merged_ids: tuple[int, ...] = ()  # stop ids that are one entry of this list
    # source of a prompt -> its route; a source that is not here is routed by its own name
    route_of: Mapping[str, str] = field(default_factory=dict[str, str])
    patience_seconds: float = TEACHER_PATIENCE  # requests are repeated when no replica answers
    progress: Callable[[], None] = lambda: None  # called from worker threads after each answer
    early: EarlyRequests | None = None  # where `ask` asks; None: it does nothing

    def __post_init__(self) -> None:
        if self.temperature != 1.0:
            raise UserError(
                "a served teacher scores at temperature 1, rollouts are drawn at "
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
        merged = self.merged_ids if self.top_k else ()
        self._list_size = (self.top_k or 0) + max(0, len(merged) - 1)  # see merge_entries
        if self._list_size > self.vocab_size:
            raise UserError(
                f"top-{self.top_k} of a vocabulary of {self.vocab_size}: lower objective.top_k"
            )
        self._extra_ids = tuple(sorted({*self.stop_ids, *merged}))
        self._idle = self.idle = IdleClock([url for urls in routes.values() for url in urls])
        self._turn = itertools.count()
        self._prompt_ids: list[str] = []

    def about(self, samples: Sequence[Sample]) -> ServedTeacher:
        """See `Scorer.about`: a prompt's source selects the teacher.

        Raises:
            UserError: no route names a prompt's source.
        """
        self._prompt_ids = [sample.prompt_id for sample in samples]
        for prompt_id in self._prompt_ids:
            self._route(prompt_id)
        return self

    def score(self, microbatches: Sequence[MicroBatch]) -> list[Scores]:
        """See `Scorer.score`.

        Raises:
            TeacherLost: no replica of some teacher answered some rank in time, or one refused a
                request. Raised on all ranks, because all of them save a checkpoint then.
        """
        replies: list[Any] = [None]
        lost = None
        asks = self.world.is_last_stage and self.world.tensor_rank == 0
        requests = [self._requests(batch) for batch in microbatches] if asks else []
        known: dict[bytes, SequenceScores] = {}
        if self.early is not None:
            known = self.early.take([_key(*one) for batch in requests for one in batch])
        if asks:
            try:
                replies = [self._request_scores(requests, known)]
            except (TeacherLost, RefusedRequest) as error:
                lost = str(error)
        for reason in gather_objects(lost):
            if reason is not None:
                raise TeacherLost(reason)
        if not self.world.is_last_stage:
            return []
        group = self.world.tensor_group
        if group.size() > 1:
            dist.broadcast_object_list(replies, src=dist.get_global_rank(group, 0), group=group)
        return [self._scores(*pair) for pair in zip(microbatches, replies[0], strict=True)]

    def ask(self, sample: Sample, step: int) -> None:
        """See `Scorer.ask`."""
        if self.early is None:
            return
        try:
            route = self._route(sample.prompt_id)
        except UserError:
            return  # `about` raises it
        prompt, response = sample.prompt_token_ids, sample.response_token_ids
        request = self._request((*prompt.tolist(), *response.tolist()), len(prompt))
        entries = 1 + 2 * request.top_k + len(request.extra_ids)
        self.early.ask(
            _key(route, request),
            partial(self._score_with_retries, self._clients[route], request, 0.0),
            size_bytes=8 * len(request.token_ids) + 4 * entries * len(response),
            step=step,
        )

    def close(self) -> None:
        """See `Scorer.close`. Requests in flight fail."""
        if self.early is not None:
            self.early.close()
        for client in itertools.chain(*self._clients.values()):
            client.close()

    def self_test(self, token_ids: Sequence[int]) -> float:
        """Score one sequence twice on every replica.

        Returns:
            The largest difference of a log-probability from the first reply of its route.

        Raises:
            UserError: the difference exceeds the tolerance (the replicas differ, or their weights
                change), or the teacher has probability beyond the common vocabulary.
            TeacherLost: a replica does not answer.
        """
        top_k = min(_SELF_TEST_TOP_K, self.vocab_size)
        request = Scoring(tuple(token_ids), 1, self.vocab_size, top_k, any_top_id=True)
        largest = 0.0
        for route, clients in self._clients.items():
            first: SequenceScores | None = None
            for client in [client for client in clients for _ in range(2)]:
                scores = self._score_with_retries([client], request, self.patience_seconds)
                first = first or scores
                self._require_within_vocabulary(client.url, scores)
                difference = float(np.abs(first.logprobs_L - scores.logprobs_L).max())
                largest = max(largest, difference)
                if difference > _SELF_TEST_TOLERANCE:
                    raise UserError(
                        f"teacher {route or 'urls'}: scores of {client.url} differ by "
                        f"{difference:.3g} from those of {clients[0].url} (allowed "
                        f"{_SELF_TEST_TOLERANCE:g}): other weights, another precision, or a server "
                        "that is not deterministic"
                    )
        return largest

    def _require_within_vocabulary(self, url: str, scores: SequenceScores) -> None:
        beyond_LK = np.where(
            scores.top_ids_LK >= self.vocab_size, np.exp(scores.top_logprobs_LK), 0.0
        )
        beyond = float(beyond_LK.sum(axis=1).max())
        if beyond > _SELF_TEST_TOLERANCE:
            raise UserError(
                f"teacher {url} gives {beyond:.3g} of its probability to token ids from "
                f"{self.vocab_size} on, which are not in the common vocabulary (allowed "
                f"{_SELF_TEST_TOLERANCE:g}): random weights, or the model of another tokenizer; "
                "teacher.engine=megatron ignores such ids"
            )

    def _route(self, prompt_id: str) -> str:
        if _ANY in self._clients:
            return _ANY
        source = prompt_id.rpartition(":")[0]
        source = self.route_of.get(source, source)
        if source not in self._clients:
            raise UserError(
                f"prompt {prompt_id}: no teacher is routed for its source {source!r}; "
                f"teacher.routes names {', '.join(sorted(self._clients))}"
            )
        return source

    def _request_scores(
        self,
        requests: Sequence[Sequence[tuple[str, Scoring]]],
        known: Mapping[bytes, SequenceScores],
    ) -> list[list[SequenceScores]]:
        """The scores of each micro-batch's requests: known by their keys, or asked for now.

        The first failure is raised at once. A request that the teacher does not answer ends when
        `close` closes its client.
        """
        pool = ThreadPoolExecutor(_MAX_IN_FLIGHT, thread_name_prefix="teacher")
        ended = threading.Event()

        def reply_to(route: str, request: Scoring) -> Future[SequenceScores]:
            scores = known.get(_key(route, request)) if known else None
            if scores is None:
                clients, patience = self._clients[route], self.patience_seconds
                return pool.submit(self._score_with_retries, clients, request, patience, ended)
            reply: Future[SequenceScores] = Future()
            reply.set_result(scores)
            return reply

        try:
            replies = [[reply_to(*one) for one in batch] for batch in requests]
            for reply in as_completed(itertools.chain(*replies)):
                reply.result()
            return [[reply.result() for reply in batch] for batch in replies]
        finally:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _requests(self, batch: MicroBatch) -> list[tuple[str, Scoring]]:
        """The route and the request of each sequence that has rows, in their order."""
        fields = (batch.tokens_T, batch.cu_seqlens, batch.rows_N, batch.sample_index_N)
        on_host = torch.cat(fields).cpu().split([len(field) for field in fields])  # one transfer
        tokens, bounds, rows, samples = (field.tolist() for field in on_host)
        first_row_of: dict[int, int] = {}
        for row, sample in zip(rows, samples, strict=True):
            first_row_of.setdefault(sample, row)
        requests = []
        for sample, first_row in first_row_of.items():
            following = bisect.bisect_right(bounds, first_row)
            start, end = bounds[following - 1], bounds[following]
            request = self._request(tuple(tokens[start:end]), first_row + 1 - start)
            route = self._route(self._prompt_ids[sample]) if self._prompt_ids else _ANY
            requests.append((route, request))
        return requests

    def _request(self, token_ids: tuple[int, ...], start: int) -> Scoring:
        return Scoring(token_ids, start, self.vocab_size, self._list_size, self._extra_ids)

    def _score_with_retries(
        self,
        clients: Sequence[SglangClient],
        request: Scoring,
        patience_seconds: float,
        ended: threading.Event | None = None,
    ) -> SequenceScores:
        """The scores of the first client that answers; each is tried at least once.

        Args:
            ended: set when nobody needs the scores any more.
        """
        ended = ended or threading.Event()
        deadline = time.monotonic() + patience_seconds
        turn, rounds, limit = next(self._turn), 0, self.settings.request_timeout_seconds
        while True:
            rounds += 1
            round_ends = time.monotonic() + 2 * limit
            for later in reversed(range(len(clients))):  # replicas that this round has not tried
                left = round_ends - time.monotonic() - later * limit / max(1, len(clients) - 1)
                client = clients[(turn - later) % len(clients)]
                try:
                    with self._idle.busy([client.url]):
                        scores = client.score(request, min(limit, max(left, limit / len(clients))))
                    self.progress()
                    return scores
                except ServerFailure as failure:
                    has_tried_all = rounds > 1 or later == 0
                    if ended.is_set() or (has_tried_all and time.monotonic() > deadline):
                        waited = f"no teacher answered for {patience_seconds:.0f} s"
                        raise TeacherLost(f"{waited}; last failure: {failure}") from failure
                    _log.warning("teacher: %s; the request is repeated", failure)
            ended.wait(pause_seconds(rounds))

    def _scores(self, batch: MicroBatch, replies: Sequence[SequenceScores]) -> Scores:
        count, device = len(batch.targets_N), batch.targets_N.device
        logprobs_N = _joined([reply.logprobs_L for reply in replies], (count,)).to(device)
        extra = (count, len(self._extra_ids))
        extra_NE = _joined([reply.extra_logprobs_LE for reply in replies], extra)
        if self.stop_ids:
            is_stop_N = torch.isin(batch.targets_N, torch.tensor(self.stop_ids, device=device))
            as_one_N = self._as_one(extra_NE, self.stop_ids).to(device)
            logprobs_N = torch.where(is_stop_N, as_one_N, logprobs_N)
        if not self.top_k:
            return Scores(logprobs_N)
        listed = (count, self._list_size)
        ids_NK = _joined([reply.top_ids_LK for reply in replies], listed).long()
        values_NK = _joined([reply.top_logprobs_LK for reply in replies], listed)
        if self.merged_ids:
            merged_N = self._as_one(extra_NE, self.merged_ids)
            merged_ids = torch.tensor(self.merged_ids)
            ids_NK, values_NK = merge_entries(ids_NK, values_NK, merged_ids, merged_N)
        return Scores(
            logprobs_N, topk_ids_NK=ids_NK.to(device), topk_logprobs_NK=values_NK.to(device)
        )

    def _as_one(self, extra_NE: Tensor, ids: Sequence[int]) -> Tensor:
        """[N]: the log-probability of these ids together."""
        columns = [self._extra_ids.index(token) for token in ids]
        return extra_NE[:, columns].logsumexp(1)


def _key(route: str, request: Scoring) -> bytes:
    """Equal for equal requests of one teacher, on all ranks."""
    digest = hashlib.blake2b(f"{route}/{request.start}/".encode(), digest_size=16)
    digest.update(np.array(request.token_ids, np.int32).tobytes())
    return digest.digest()


def _joined(parts: Sequence[NDArray[Any]], shape: tuple[int, ...]) -> Tensor:
    """The rows of all parts, which make this shape; there may be no part."""
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(shape)


def merge_entries(
    ids_NK: Tensor, logprobs_NK: Tensor, merged_ids: Tensor, merged_logprob_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The K most probable entries when J merged ids count as one, from lists of K + J - 1 ids.

    Exact: a list without some merged id holds at least K other ids; a list with all J holds K - 1
    others, and the merged entry is the K-th.
    """
    keep = ids_NK.shape[1] - (len(merged_ids) - 1)
    others_NK = logprobs_NK.masked_fill(torch.isin(ids_NK, merged_ids), -torch.inf)
    top = torch.cat([others_NK, merged_logprob_N[:, None]], dim=1).topk(keep, dim=1)
    first_N1 = merged_ids[:1].expand(len(ids_NK), 1)
    return torch.cat([ids_NK, first_N1], dim=1).gather(1, top.indices), top.values
