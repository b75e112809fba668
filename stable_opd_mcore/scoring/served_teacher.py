"""A teacher that is served: one or several SGLang addresses, any architecture SGLang knows.

Scores are of the plain softmax at temperature 1 (SGLang ignores the temperature where it scores a
prompt), so the rollouts must be drawn at 1. They are also normalised over all rows of its output
head, those beyond the tokenizer's vocabulary included: trained models have nothing there, and a
teacher that has is refused at the start. No hidden states come over HTTP: objectives over the
full vocabulary need a teacher in the trainer (megatron.py).

The last pipeline stage's first tensor rank asks and shares the answers with its twins. A replica
that fails is passed over for the next; when all fail, they are asked again until
`patience_seconds` have passed.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.config.schema import TeacherConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.head import Head, StopClass
from stable_opd_mcore.parallel.world import World, gather_objects
from stable_opd_mcore.records import MicroBatch, Scores
from stable_opd_mcore.serving.api_key import read_api_key
from stable_opd_mcore.serving.client import (
    Scoring,
    SequenceScores,
    ServerFailure,
    SglangClient,
)

_IN_FLIGHT = 64
_PAUSE_SECONDS = 2.0
_TOP_SEEN = 8  # of the self-test's tokens, to see where a teacher's probability lies
_ANY = ""  # the one route of a teacher that answers for every source


class TeacherLost(UserError):
    """No replica of a teacher answers. Raised before the step has changed anything."""


class ServedTeacher:
    """A `Scorer` over HTTP.

    Args:
        settings: addresses and limits.
        vocab_size: the common vocabulary of student and teacher.
        temperature: of the rollouts; only 1 can be served.
        stop: the teacher's own stop class (METHOD §4), None to score the plain token.
        top_k: also ask for the K most probable tokens.
        merged_ids: stop ids that are one entry of this list (losses.terms.Terms.merged_ids).
        patience_seconds: how long an absent teacher is waited for.

    Raises:
        UserError: a temperature other than 1, no key where one is named, or a list longer than
            the vocabulary.
    """

    def __init__(
        self,
        settings: TeacherConfig,
        world: World,
        *,
        vocab_size: int,
        temperature: float,
        stop: StopClass | None = None,
        top_k: int | None = None,
        merged_ids: tuple[int, ...] = (),
        patience_seconds: float = 600.0,
    ) -> None:
        if temperature != 1.0:
            raise UserError(
                f"a served teacher scores at temperature 1, rollouts are drawn at {temperature}: "
                "their log-probabilities do not compare; set sampling.temperature=1, or "
                "teacher.engine=megatron, which scores at any"
            )
        routes = {_ANY: settings.urls} if settings.urls else settings.routes
        self._clients = {
            route: [
                SglangClient(
                    url,
                    api_key=read_api_key(settings.api_key_file),
                    request_timeout_seconds=settings.request_timeout_seconds,
                )
                for url in urls
            ]
            for route, urls in routes.items()
        }
        self._tolerance = settings.self_test_tolerance
        self._world = world
        self._vocab_size = vocab_size
        self._stop = stop
        self._top_k = top_k or 0
        self._merged_ids = torch.tensor(merged_ids if top_k else (), dtype=torch.int64)
        # As many tokens as hold the K most probable entries whatever is merged, see merge_entries.
        self._listed = self._top_k + max(0, len(self._merged_ids) - 1)
        if self._listed > vocab_size:
            raise UserError(
                f"top-{self._top_k} of a vocabulary of {vocab_size}: lower objective.top_k"
            )
        class_ids = stop.class_ids if stop else ()
        self._extra_ids = tuple(sorted({*class_ids, *self._merged_ids.tolist()}))
        self._patience = patience_seconds
        self._turn = itertools.count()
        self._prompt_ids: list[str] = []

    @property
    def head(self) -> Head | None:
        """A served teacher's head stays where it is."""
        return None

    def about(self, prompt_ids: Sequence[str]) -> ServedTeacher:
        """This teacher, told which prompt each sample of the next micro-batches answers.

        Raises:
            UserError: a prompt whose source no route names.
        """
        for prompt_id in prompt_ids:
            self._route(prompt_id)
        self._prompt_ids = list(prompt_ids)
        return self

    def score(self, microbatches: Sequence[MicroBatch]) -> list[Scores]:
        """See `Scorer.score`.

        Raises:
            TeacherLost: no replica of some teacher answered some rank in time. Raised on all of
                them, for all save a checkpoint then.
        """
        answers: list[Any] = [None]
        lost = None
        if self._world.is_last_stage and self._world.tensor_rank == 0:
            try:
                answers = [self._ask(microbatches)]
            except TeacherLost as error:
                lost = str(error)
        for reason in gather_objects(lost):
            if reason is not None:
                raise TeacherLost(reason)
        if not self._world.is_last_stage:
            return []
        group = self._world.tensor_group
        if group.size() > 1:
            dist.broadcast_object_list(answers, src=dist.get_global_rank(group, 0), group=group)
        return [
            self._scores(batch, said) for batch, said in zip(microbatches, answers[0], strict=True)
        ]

    def self_test(self, token_ids: Sequence[int]) -> float:
        """Ask every replica twice about one sequence; the largest difference to its route's first
        answer.

        Raises:
            UserError: it exceeds the tolerance: replicas that disagree, or weights that change;
                or probability beyond the common vocabulary, which the student cannot follow.
            TeacherLost: a replica does not answer.
        """
        top_k = min(_TOP_SEEN, self._vocab_size)
        request = Scoring(tuple(token_ids), 1, self._vocab_size, top_k)
        worst = 0.0
        for route, clients in self._clients.items():
            first: SequenceScores | None = None
            for client in [client for client in clients for _ in range(2)]:
                said = self._patiently([client], request)
                first = first or said
                self._require_within_vocabulary(client.url, said)
                pairs = zip(first.logprobs, said.logprobs, strict=True)
                difference = max(abs(a - b) for a, b in pairs)
                worst = max(worst, difference)
                if difference > self._tolerance:
                    raise UserError(
                        f"teacher {route or 'urls'}: {client.url} differs by {difference:.3g} "
                        f"from {clients[0].url} (allowed {self._tolerance:g}) about one sequence: "
                        "other weights, another precision, or a server that is not deterministic"
                    )
        return worst

    def _require_within_vocabulary(self, url: str, said: SequenceScores) -> None:
        beyond = max(
            sum(
                math.exp(value)
                for token, value in zip(*top, strict=True)
                if token >= self._vocab_size
            )
            for top in zip(said.top_ids, said.top_logprobs, strict=True)
        )
        if beyond > self._tolerance:
            raise UserError(
                f"teacher {url} gives {beyond:.3g} of its probability to token ids from "
                f"{self._vocab_size} on, which are not in the common vocabulary (allowed "
                f"{self._tolerance:g}): random weights, or the model of another tokenizer; "
                "teacher.engine=megatron leaves such ids out"
            )

    def _route(self, prompt_id: str) -> str:
        if _ANY in self._clients:
            return _ANY
        source = prompt_id.rpartition(":")[0]
        if source not in self._clients:
            raise UserError(
                f"prompt {prompt_id}: no teacher is routed for its source {source!r}; "
                f"teacher.routes names {', '.join(sorted(self._clients))}"
            )
        return source

    def _ask(self, microbatches: Sequence[MicroBatch]) -> list[list[SequenceScores]]:
        """Per micro-batch, one answer per sequence that has rows, in their order."""
        with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="teacher") as pool:
            futures = [
                [
                    pool.submit(self._patiently, self._clients[route], request)
                    for route, request in self._requests(batch)
                ]
                for batch in microbatches
            ]
            return [[future.result() for future in batch] for batch in futures]

    def _requests(self, batch: MicroBatch) -> list[tuple[str, Scoring]]:
        tokens = batch.tokens_T.tolist()
        bounds = batch.cu_seqlens.tolist()
        rows, samples = batch.rows_N.tolist(), batch.sample_index_N.tolist()
        first_row_of: dict[int, int] = {}
        for row, sample in zip(rows, samples, strict=True):
            first_row_of.setdefault(sample, row)
        requests = []
        for sample, first_row in first_row_of.items():
            following = bisect.bisect_right(bounds, first_row)
            start, end = bounds[following - 1], bounds[following]
            request = Scoring(
                token_ids=tuple(tokens[start:end]),
                start=first_row + 1 - start,
                vocab_size=self._vocab_size,
                top_k=self._listed,
                extra_ids=self._extra_ids,
            )
            route = self._route(self._prompt_ids[sample]) if self._prompt_ids else _ANY
            requests.append((route, request))
        return requests

    def _patiently(self, clients: Sequence[SglangClient], request: Scoring) -> SequenceScores:
        deadline = time.monotonic() + self._patience
        turn = next(self._turn)
        for attempt in itertools.count(turn):
            try:
                return clients[attempt % len(clients)].score(request)
            except ServerFailure as failure:
                if time.monotonic() > deadline:
                    raise TeacherLost(
                        f"no teacher answered for {self._patience:.0f} s; at last: {failure}"
                    ) from failure
            if (attempt - turn) % len(clients) == len(clients) - 1:
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _scores(self, batch: MicroBatch, answers: Sequence[SequenceScores]) -> Scores:
        targets_N = batch.targets_N.cpu()
        count, device = len(targets_N), batch.targets_N.device
        logprobs_N = torch.tensor([value for said in answers for value in said.logprobs])
        extra_NE = torch.tensor([row for said in answers for row in said.extra_logprobs])
        extra_NE = extra_NE.view(count, len(self._extra_ids))
        if self._stop is not None:
            is_own_E = torch.isin(torch.tensor(self._extra_ids), torch.tensor(self._stop.class_ids))
            triggered_N = torch.isin(targets_N, torch.tensor(self._stop.trigger_ids))
            logprobs_N = torch.where(triggered_N, extra_NE[:, is_own_E].logsumexp(1), logprobs_N)
        if not self._top_k:
            return Scores(logprobs_N.to(device))
        ids = [row for said in answers for row in said.top_ids]
        values = [row for said in answers for row in said.top_logprobs]
        ids_NK = torch.tensor(ids, dtype=torch.int64).view(count, self._listed)
        values_NK = torch.tensor(values).view(count, self._listed)
        if len(self._merged_ids):
            is_merged_E = torch.isin(torch.tensor(self._extra_ids), self._merged_ids)
            stopped_N = extra_NE[:, is_merged_E].logsumexp(1)
            ids_NK, values_NK = merge_entries(ids_NK, values_NK, self._merged_ids, stopped_N)
        return Scores(
            logprobs_N.to(device),
            topk_ids_NK=ids_NK.to(device),
            topk_logprobs_NK=values_NK.to(device),
        )


def merge_entries(
    ids_NK: Tensor, logprobs_NK: Tensor, merged_ids: Tensor, merged_logprob_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The K most probable entries once J merged ids are one of them, from lists of K + J - 1.

    Exact: such a list holds K other ids, unless all J are in it; then their sum is among the K.
    """
    keep = ids_NK.shape[1] - (len(merged_ids) - 1)
    others_NK = logprobs_NK.masked_fill(torch.isin(ids_NK, merged_ids), -torch.inf)
    top = torch.cat([others_NK, merged_logprob_N[:, None]], dim=1).topk(keep, dim=1)
    first_N1 = merged_ids[:1].expand(len(ids_NK), 1)
    return torch.cat([ids_NK, first_N1], dim=1).gather(1, top.indices), top.values
