"""HTTP client of one SGLang server: requests in token ids, and replies that were checked.

A reply is refused unless its ids are in the vocabulary, each token has a finite log-probability and
the finish reason fits the request. Safe to use from many threads. Not here: choosing a server,
restarts, redrawing (rollout/sglang/fleet.py), weights (rollout/sglang/sync.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import orjson

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.connection import Connections, ServerFailure
from stable_opd_mcore.serving.requests import (
    MAX_REPLY_BYTES,
    Completion,
    Generation,
    Scoring,
    SequenceScores,
)

ATTEMPTS = 6  # for requests that may be repeated
_MAX_PAUSE_SECONDS = 2.0
_ROUNDING = 1e-3  # a log-probability may exceed 0 by this much
_RETRYABLE_STATUSES = (408, 429)  # request time-out, too many requests
_PLAIN_TEXT = ("/flush_cache", "/abort_request", "/freeze_gc")  # routes that reply with a sentence
_log = logging.getLogger("stable_opd_mcore.serving")


def pause_seconds(attempt: int) -> float:
    """The pause after the failed attempt number `attempt`, from 1: doubling, with jitter."""
    return min(_MAX_PAUSE_SECONDS, 0.1 * 2**attempt) * random.uniform(0.5, 1.0)


class RefusedRequest(UserError):
    """The server refuses the request (HTTP 4xx); repeating it cannot help."""

    def __init__(self, url: str, path: str, status: int, detail: str) -> None:
        super().__init__(f"{url}{path}: HTTP {status}: {detail}")
        self.status = status


@dataclass(eq=False, repr=False)  # no log shows the key
class SglangClient:
    """Requests to one server. Safe to use from many threads."""

    url: str
    _: KW_ONLY
    api_key: str | None = None
    request_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._connections = Connections(self.url, self.api_key)

    def close(self) -> None:
        """Send no more requests; those in flight fail at once as unreachable."""
        self._connections.close()

    def is_healthy(self, timeout_seconds: float = timeouts.PROBE) -> bool:
        """Whether the server's scheduler answers; SGLang draws one token for it, in a second."""
        try:
            seconds, limit = timeout_seconds, MAX_REPLY_BYTES
            return self._connections.send("GET", "/health", None, seconds, limit)[0] == 200
        except ServerFailure:
            return False

    def weight_version(self) -> str:
        """The version of the last publish; "default" before the first."""
        return str(self._stated("/model_info", "weight_version"))

    def release(self) -> str:
        """SGLang's version, e.g. "0.5.23"."""
        return str(self._stated("/server_info", "version"))

    def tensor_ranks(self) -> int:
        """The number of the server's tensor-parallel ranks."""
        return int(self._stated("/server_info", "tp_size"))

    def capacity(self) -> tuple[int, int]:
        """The responses that the server draws at a time, and the tokens that its cache holds."""
        reply = self.call("GET", "/server_info", None, timeouts.QUESTION, attempts=ATTEMPTS)
        try:
            states = reply["internal_states"]  # one of each of the server's replicas
            responses = [s["effective_max_running_requests_per_dp"] for s in states]
            tokens = _whole_number(reply["max_total_num_tokens"]) * len(states)
            return sum(map(_whole_number, responses)), tokens
        except (KeyError, TypeError, ValueError) as error:
            raise self.garbage(f"/server_info states no capacity: {error!r}") from error

    def _stated(self, path: str, key: str) -> str | int:
        reply = self.call("GET", path, None, timeouts.QUESTION, attempts=ATTEMPTS)
        if not isinstance(reply, dict) or not isinstance(reply.get(key), str | int):
            raise self.garbage(f"{path} states no {key}")
        return reply[key]

    def generate(self, request: Generation) -> list[Completion]:
        """`num_samples` responses to one prompt, which is computed once for all of them.

        The finish_reason of those that were aborted is "abort"; they may have no token.

        Raises:
            ServerFailure: no usable reply.
            RefusedRequest: the server refuses the request.
        """
        body, max_bytes = request.payload(), request.max_reply_bytes
        reply = self.call("POST", "/generate", body, max_bytes=max_bytes)
        responses = reply if isinstance(reply, list) else [reply]
        wanted = request.sampling.num_samples
        if len(responses) != wanted:
            raise self.garbage(f"{len(responses)} responses, requested {wanted}")
        return [self._completion(response, request) for response in responses]

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of a prompt's tokens the prefix cache holds; afterwards it holds them all."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": list(token_ids), "sampling_params": sampling}
        reply = self.call("POST", "/generate", body, timeouts.QUESTION, attempts=ATTEMPTS)
        try:
            return _whole_number(reply["meta_info"]["cached_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise self.garbage(f"no cached_tokens: {error!r}") from error

    def score(self, request: Scoring, timeout_seconds: float | None = None) -> SequenceScores:
        """The served model's scores of a sequence's tokens from `start` on, at temperature 1.

        Args:
            timeout_seconds: of the whole request; None: `request_timeout_seconds`.

        Raises:
            ServerFailure, RefusedRequest: as for `generate`.
            UserError: an id is outside the vocabulary; nothing is sent.
        """
        body, max_bytes = request.payload(), request.max_reply_bytes
        reply = self.call("POST", "/generate", body, timeout_seconds, max_bytes=max_bytes)
        try:
            meta = reply["meta_info"]
            logprobs, ids = _scored(meta["input_token_logprobs"][1:])
            top = [_scored(row) for row in meta["input_top_logprobs"][1:]] if request.top_k else []
            extra = meta["input_token_ids_logprobs"][1:] if request.extra_ids else []
            extra_logprobs = [_scored(row)[0] for row in extra]
        except (KeyError, TypeError, ValueError) as error:
            raise self.garbage(f"not scores: {error!r}") from error
        top_logprobs, top_ids = [row for row, _ in top], [row for _, row in top]
        sent = request.token_ids[request.start :]
        last = request.vocab_size - 1  # SGLang reports the last id of its vocabulary as 0
        if ids != sent and ids != tuple(0 if token == last else token for token in sent):
            raise self.garbage(
                f"scores of {len(ids)} tokens {ids[:8]}..., "
                f"requested of {len(sent)} tokens {sent[:8]}..."
            )
        lists = ((top_logprobs, request.top_k), (extra_logprobs, len(request.extra_ids)))
        for rows, width in lists:
            if width and [len(row) for row in rows] != [width] * len(sent):
                raise self.garbage(f"not {len(sent)} lists of {width} entries")
        highest = np.iinfo(np.int32).max if request.any_top_id else last
        if not all(0 <= token <= highest for token in itertools.chain(*top_ids)):
            raise self.garbage(f"a top token is outside the vocabulary of {request.vocab_size}")
        listed, looked_up = (len(sent), request.top_k), (len(sent), len(request.extra_ids))
        return SequenceScores(
            np.array(logprobs, np.float32),
            np.array(top_ids, np.int32).reshape(listed),
            np.array(top_logprobs, np.float32).reshape(listed),
            np.array(extra_logprobs, np.float32).reshape(looked_up),
        )

    def call(
        self,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
        *,
        max_bytes: int = MAX_REPLY_BYTES,
        attempts: int = 1,
    ) -> Any:
        """Send one request and return its JSON reply; a sentence is returned as str, "" as None.

        Args:
            timeout_seconds: of the whole request; None: `request_timeout_seconds`.
            max_bytes: a longer reply is refused.
            attempts: how often the request is sent if it fails in a transient way; more than one
                only for requests that may be repeated.

        Raises:
            ServerFailure: unreachable, too late, 5xx, 408 or 429, too long, or not JSON.
            RefusedRequest: any other 4xx.
        """
        body = None if payload is None else json.dumps(payload, allow_nan=False)
        seconds = timeout_seconds or self.request_timeout_seconds
        attempt = 0
        while True:
            attempt += 1
            try:
                status, content = self._connections.send(method, path, body, seconds, max_bytes)
                return self._content(path, status, content)
            except ServerFailure as failure:
                if not failure.transient or attempt == attempts:
                    raise
                _log.warning("%s; attempt %d of %d", failure, attempt, attempts)
                time.sleep(pause_seconds(attempt))

    def _content(self, path: str, status: int, content: bytes) -> Any:
        """What a reply says, if it says that the request was fulfilled."""
        if status >= 500 or status in _RETRYABLE_STATUSES:
            raise ServerFailure(self.url, "status", f"{path}: HTTP {status}", transient=True)
        if status >= 400:
            detail = content[:500].decode(errors="replace")
            raise RefusedRequest(self.url, path, status, detail)
        if path.partition("?")[0] in _PLAIN_TEXT:
            return content.decode(errors="replace")
        if not content:
            return None
        try:
            return orjson.loads(content)  # refuses NaN, Infinity and what overflows to it
        except ValueError as error:
            raise self.garbage(f"{path}: not JSON: {content[:80]!r}") from error

    def _completion(self, response: Any, request: Generation) -> Completion:
        try:
            meta = response["meta_info"]
            finish = meta["finish_reason"]["type"]
            ids = tuple(_whole_number(token) for token in response["output_ids"])
            logprobs, scored_ids = _scored(meta["output_token_logprobs"])
            spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
            versions = tuple(str(span["version"]) for span in spans)
            cached = _whole_number(meta.get("cached_tokens") or 0)
            routed_experts = None
            if finish == "abort" and request.routing is not None and "routed_experts" not in meta:
                ids = logprobs = scored_ids = ()  # retracted; without experts they are of no use
            if ids and ids[-1] in request.sampling.stop_token_ids:
                finish = "stop"  # SGLang states "length" for a stop token at max_new_tokens
            elif finish == "abort" and len(ids) == request.sampling.max_new_tokens:
                finish = "length"  # aborted while its last token was drawn
            if request.routing is not None and ids:
                positions = len(request.token_ids) + len(ids) - 1 - request.routing_start
                encoded = meta["routed_experts"]
                routed_experts = request.routing.parse(encoded, np.int32, positions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self.garbage(f"not a response: {error!r}") from error
        defect = _defect(ids, scored_ids, finish, request)
        if defect is not None:
            raise self.garbage(defect)
        return Completion(ids, logprobs, finish, versions, cached, routed_experts)

    def garbage(self, detail: str) -> ServerFailure:
        """The failure of a reply that cannot be used."""
        return ServerFailure(self.url, "garbage", detail, transient=True)


def _defect(
    ids: tuple[int, ...],
    scored_ids: tuple[int, ...],
    finish: str,
    request: Generation,
) -> str | None:
    """Why a response is unusable; None if it is usable."""
    longest = request.sampling.max_new_tokens
    if ids != scored_ids:
        return f"{len(ids)} tokens, but {len(scored_ids)} log-probabilities of other tokens"
    least = 0 if finish == "abort" else 1
    if not least <= len(ids) <= longest:
        return f"{len(ids)} tokens, requested {least} to {longest}"
    if not all(0 <= token < request.vocab_size for token in ids):
        return f"a token outside the vocabulary of {request.vocab_size}"
    if finish not in ("stop", "length", "abort"):
        return f"finish reason {finish!r}"
    if (finish == "stop") != (ids[-1:] != () and ids[-1] in request.sampling.stop_token_ids):
        return f"finish reason {finish!r} with last token {ids[-1]}"
    if finish == "length" and len(ids) != longest:
        return f"finish reason 'length' after {len(ids)} of {longest} tokens"
    return None


def _scored(entries: Sequence[Any]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The log-probabilities and the ids of SGLang's [log-probability, id, text].

    Raises:
        TypeError, ValueError: an entry of another kind, or a value that is no log-probability.
    """
    logprobs = tuple(float(value) for value, _, _ in entries)
    wrong = [value for value in logprobs if not (math.isfinite(value) and value <= _ROUNDING)]
    if wrong:
        raise ValueError(f"{wrong[0]} is not a log-probability")
    return logprobs, tuple(_whole_number(token) for _, token, _ in entries)


def _whole_number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value
