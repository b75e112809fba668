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
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpcore

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.serving.connection import TCP_KEEPALIVE, Connection, TooLargeError
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


class ServerFailure(RuntimeError):
    """A request failed. `kind`: unreachable, timeout, status, garbage or aborted.

    `transient`: the server may fulfil the same request when it is repeated.
    """

    def __init__(self, url: str, kind: str, detail: str, *, transient: bool = False) -> None:
        super().__init__(f"{url}: {kind}: {detail}")
        self.url = url
        self.kind = kind
        self.detail = detail
        self.transient = transient


class RefusedRequest(UserError):
    """The server refuses the request (HTTP 4xx); repeating it cannot help."""

    def __init__(self, url: str, path: str, status: int, detail: str) -> None:
        super().__init__(f"{url}{path}: HTTP {status}: {detail}")
        self.status = status


class SglangClient:
    """Requests to one server, each over a connection of its own.

    SGLang closes idle connections after 5 s, and a request sent at that moment is lost, so none is
    kept. A machine that sends no packet for SILENCE_SECONDS is unreachable, whatever the request's
    own time-out.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, request_timeout_seconds: float = 600.0
    ) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.is_closed = False
        self._timeout = request_timeout_seconds
        self._headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",  # a compressed reply could be of any size
            "Connection": "close",
        }
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()

    def copy(self) -> SglangClient:
        """A new client of the same server."""
        return SglangClient(self.url, api_key=self.api_key, request_timeout_seconds=self._timeout)

    def close(self) -> None:
        """Send no more requests; those in flight fail at once as unreachable."""
        with self._lock:
            self.is_closed = True
            for connection in self._connections:
                connection.shutdown()

    def is_healthy(self, timeout_seconds: float = 20.0) -> bool:
        """Whether the server's scheduler answers; SGLang draws one token for it, in a second."""
        try:
            return self._send("GET", "/health", None, timeout_seconds, MAX_REPLY_BYTES)[0] == 200
        except ServerFailure:
            return False

    def weight_version(self) -> str:
        """The version of the last publish; "default" before the first."""
        return str(self.call("GET", "/model_info", attempts=ATTEMPTS).get("weight_version"))

    def release(self) -> str:
        """SGLang's version, e.g. "0.5.23"."""
        return str(self._server_info("version"))

    def tensor_ranks(self) -> int:
        """The number of the server's tensor-parallel ranks."""
        return int(self._server_info("tp_size"))

    def _server_info(self, key: str) -> Any:
        reply = self.call("GET", "/server_info", timeout_seconds=30.0, attempts=ATTEMPTS)
        if not isinstance(reply, dict) or not isinstance(reply.get(key), str | int):
            raise self._garbage(f"/server_info states no {key}")
        return reply[key]

    def generate(self, request: Generation) -> list[Completion]:
        """`num_samples` responses to one prompt, which is computed once for all of them.

        Raises:
            ServerFailure: no usable reply.
            RefusedRequest: the server refuses the request.
        """
        body, max_bytes = request.payload(), request.max_reply_bytes
        reply = self.call("POST", "/generate", body, max_bytes=max_bytes)
        responses = reply if isinstance(reply, list) else [reply]
        if len(responses) != request.num_samples:
            raise self._garbage(f"{len(responses)} responses, requested {request.num_samples}")
        return [self._completion(response, request) for response in responses]

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of a prompt's tokens the prefix cache holds; afterwards it holds them all."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": list(token_ids), "sampling_params": sampling}
        reply = self.call("POST", "/generate", body, 60.0, attempts=ATTEMPTS)
        try:
            return _whole_number(reply["meta_info"]["cached_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._garbage(f"no cached_tokens: {error!r}") from error

    def score(self, request: Scoring) -> SequenceScores:
        """The served model's scores of a sequence's tokens from `start` on, at temperature 1.

        Raises:
            ServerFailure, RefusedRequest: as for `generate`.
            UserError: an id is outside the vocabulary; nothing is sent.
        """
        body, max_bytes = request.payload(), request.max_reply_bytes
        reply = self.call("POST", "/generate", body, max_bytes=max_bytes)
        try:
            meta = reply["meta_info"]
            entries = meta["input_token_logprobs"][1:]
            logprobs = tuple(float(value) for value, _, _ in entries)
            ids = tuple(token for _, token, _ in entries)
            tops = meta["input_top_logprobs"][1:] if request.top_k else []
            top_ids = tuple(tuple(_whole_number(token) for _, token, _ in row) for row in tops)
            top_logprobs = tuple(tuple(float(value) for value, _, _ in row) for row in tops)
            extra = meta["input_token_ids_logprobs"][1:] if request.extra_ids else []
            extra_logprobs = tuple(tuple(float(value) for value, _, _ in row) for row in extra)
        except (KeyError, TypeError, ValueError) as error:
            raise self._garbage(f"not scores: {error!r}") from error
        sent_ids = request.token_ids[request.start :]
        last = request.vocab_size - 1  # SGLang reports the last id of its vocabulary as 0
        if len(ids) != len(sent_ids) or any(
            scored != sent and not (scored == 0 and sent == last)
            for scored, sent in zip(ids, sent_ids, strict=True)
        ):
            raise self._garbage(
                f"scores of {len(ids)} tokens {ids[:8]}..., "
                f"requested of {len(sent_ids)} tokens {sent_ids[:8]}..."
            )
        for rows, width in (
            (top_logprobs, request.top_k),
            (extra_logprobs, len(request.extra_ids)),
        ):
            if width and [len(row) for row in rows] != [width] * len(sent_ids):
                raise self._garbage(f"not {len(sent_ids)} lists of {width} entries")
        highest = math.inf if request.any_top_id else last
        if not all(0 <= token <= highest for token in itertools.chain(*top_ids)):
            raise self._garbage(f"a top token is outside the vocabulary of {request.vocab_size}")
        if not _are_logprobs([*logprobs, *itertools.chain(*top_logprobs, *extra_logprobs)]):
            raise self._garbage("a score is not a log-probability")
        return SequenceScores(logprobs, top_ids, top_logprobs, extra_logprobs)

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
        for attempt in range(1, attempts):
            try:
                return self._call(method, path, payload, timeout_seconds, max_bytes)
            except ServerFailure as failure:
                if not failure.transient:
                    raise
                _log.warning("%s; attempt %d of %d", failure, attempt, attempts)
                time.sleep(pause_seconds(attempt))
        return self._call(method, path, payload, timeout_seconds, max_bytes)

    def _call(
        self,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None,
        timeout_seconds: float | None,
        max_bytes: int,
    ) -> Any:
        status, content = self._send(method, path, payload, timeout_seconds, max_bytes)
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
            return json.loads(content, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            detail = f"{path}: not JSON ({type(error).__name__}): {content[:80]!r}"
            raise self._garbage(detail) from error

    def _send(
        self,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None,
        timeout_seconds: float | None,
        max_bytes: int,
    ) -> tuple[int, bytes]:
        """Status and content of the reply."""
        connection = Connection(timeout_seconds or self._timeout, max_bytes)
        with self._lock:
            if self.is_closed:
                raise ServerFailure(self.url, "unreachable", f"{path}: the client is closed")
            self._connections.add(connection)
        try:
            content = None if payload is None else json.dumps(payload, allow_nan=False).encode()
            url, headers = httpcore.URL(self.url + path), list(self._headers.items())
            with httpcore.HTTPConnection(
                url.origin, network_backend=connection, socket_options=TCP_KEEPALIVE
            ) as http:
                response = http.request(method, url, headers=headers, content=content)
            return response.status, response.content
        except httpcore.TimeoutException as error:
            raise ServerFailure(self.url, "timeout", f"{path}: {type(error).__name__}") from error
        except TooLargeError as error:
            detail = f"{path}: more than {max_bytes} bytes"
            raise ServerFailure(self.url, "garbage", detail) from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            broken = not isinstance(error, httpcore.ConnectError) and not self.is_closed
            detail = f"{path}: {error!r}"
            raise ServerFailure(self.url, "unreachable", detail, transient=broken) from error
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _completion(self, response: Any, request: Generation) -> Completion:
        try:
            meta = response["meta_info"]
            finish = meta["finish_reason"]["type"]
            if finish == "abort":
                raise ServerFailure(self.url, "aborted", str(meta["finish_reason"].get("message")))
            ids = tuple(_whole_number(token) for token in response["output_ids"])
            drawn = meta["output_token_logprobs"]
            logprobs = tuple(float(value) for value, _, _ in drawn)
            scored_ids = tuple(token for _, token, _ in drawn)
            spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
            versions = tuple(str(span["version"]) for span in spans)
            cached = _whole_number(meta.get("cached_tokens") or 0)
            if ids and ids[-1] in request.stop_token_ids:
                finish = "stop"  # SGLang states "length" for a stop token at max_new_tokens
            routed_experts = None
            if request.routing is not None:
                positions = len(request.token_ids) + len(ids) - 1
                routed_experts = request.routing.parse(meta["routed_experts"], positions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._garbage(f"not a response: {error!r}") from error
        defect = _defect(ids, scored_ids, logprobs, finish, request)
        if defect is not None:
            raise self._garbage(defect)
        return Completion(ids, logprobs, finish, versions, cached, routed_experts)

    def _garbage(self, detail: str) -> ServerFailure:
        return ServerFailure(self.url, "garbage", detail, transient=True)


def _defect(
    ids: tuple[int, ...],
    scored_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    finish: str,
    request: Generation,
) -> str | None:
    """Why a response is unusable; None if it is usable."""
    if ids != scored_ids:
        return f"{len(ids)} tokens, but {len(scored_ids)} log-probabilities of other tokens"
    if not ids or len(ids) > request.max_new_tokens:
        return f"{len(ids)} tokens, requested 1 to {request.max_new_tokens}"
    if not all(0 <= token < request.vocab_size for token in ids):
        return f"a token outside the vocabulary of {request.vocab_size}"
    if not _are_logprobs(logprobs):
        return "a log-probability is positive or not finite"
    if finish not in ("stop", "length"):
        return f"finish reason {finish!r}"
    if (finish == "stop") != (ids[-1] in request.stop_token_ids):
        return f"finish reason {finish!r} with last token {ids[-1]}"
    if finish == "length" and len(ids) != request.max_new_tokens:
        return f"finish reason 'length' after {len(ids)} of {request.max_new_tokens} tokens"
    return None


def _are_logprobs(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value <= _ROUNDING for value in values)


def _whole_number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _finite(text: str) -> float:
    """A number of a JSON text; refuses NaN, Infinity and what overflows to it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
