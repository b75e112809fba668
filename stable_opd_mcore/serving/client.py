"""HTTP client of one SGLang server: requests in token ids, and replies that were checked.

A reply is refused unless its ids are in the vocabulary, each token has a finite log-probability and
the finish reason fits the request. Safe to use from many threads. Not here: choosing a server,
restarts, redrawing (rollout/sglang/fleet.py), weights (rollout/sglang/sync.py).
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from stable_opd_mcore.errors import UserError

_ROUNDING = 1e-3  # a log-probability may exceed 0 by this much
_EXCLUDED_LOGIT_BIAS = -1e9  # gives probability 0; JSON has no infinity
# Every sampling setting is sent: for those left out, a server may have defaults of its own.
_PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0}
_PLAIN_SAMPLING |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
_RETRYABLE_STATUSES = (408, 429)  # request time-out, too many requests
_PLAIN_TEXT = ("/flush_cache", "/abort_request", "/freeze_gc")  # routes that reply with a sentence
_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
SILENCE_SECONDS = 30  # until a machine whose kernel sends no TCP packets counts as unreachable
_TCP_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS // 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000),
)


class ServerFailure(RuntimeError):
    """A request failed. `kind`: unreachable, timeout, status, garbage or aborted."""

    def __init__(self, url: str, kind: str, detail: str) -> None:
        super().__init__(f"{url}: {kind}: {detail}")
        self.url = url
        self.kind = kind
        self.detail = detail


class _Transient(ServerFailure):
    """A failure that a repeated request may not meet."""


class RefusedRequest(UserError):
    """The server refuses the request (HTTP 4xx); repeating it cannot help."""

    def __init__(self, url: str, path: str, status: int, detail: str) -> None:
        super().__init__(f"{url}{path}: HTTP {status}: {detail}")
        self.status = status


@dataclass(frozen=True)
class Completion:
    """One drawn response."""

    token_ids: tuple[int, ...]  # with its stop token
    logprobs: tuple[float, ...]  # per token, full softmax at the sampling temperature
    finish_reason: str  # "stop" or "length"
    weight_versions: tuple[str, ...]  # in order; several if the weights changed during the response
    cached_tokens: int  # prompt tokens that the server's prefix cache held


@dataclass(frozen=True)
class Generation:
    """A request for several responses to one prompt."""

    token_ids: tuple[int, ...]
    num_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int  # no id at or above it is sent or accepted
    padded_vocab_size: int = 0  # rows of the served model; those from vocab_size on are not drawn

    def payload(self) -> dict[str, Any]:
        """The body of /generate.

        Raises:
            UserError: an id is outside the vocabulary, which would crash the server.
        """
        require_in_vocabulary(self.token_ids, self.vocab_size)
        padding = range(self.vocab_size, self.padded_vocab_size)
        return {
            "input_ids": [list(self.token_ids)],
            "sampling_params": {
                # applied before the softmax, so log-probabilities exclude the padding rows
                "logit_bias": {str(token): _EXCLUDED_LOGIT_BIAS for token in padding} or None,
                "n": self.num_samples,
                "temperature": self.temperature,
                "top_p": self.top_p,
                **_PLAIN_SAMPLING,
                "max_new_tokens": self.max_new_tokens,
                "stop_token_ids": list(self.stop_token_ids),
                "ignore_eos": True,  # only stop_token_ids end a response
                "skip_special_tokens": False,
            },
            "return_logprob": True,
        }


@dataclass(frozen=True)
class Scoring:
    """A request for the log-probabilities of a given sequence."""

    token_ids: tuple[int, ...]
    start: int  # first token to score, at least 1
    vocab_size: int
    top_k: int = 0
    extra_ids: tuple[int, ...] = ()  # also score these ids at every position

    def payload(self) -> dict[str, Any]:
        """The body of /generate.

        Raises:
            UserError: an id is outside the vocabulary, which would crash the server.
        """
        assert self.start >= 1, "nothing predicts a sequence's first token"
        require_in_vocabulary(self.token_ids, self.vocab_size)
        return {
            "input_ids": list(self.token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": self.start - 1,  # the reply's first entry has no log-probability
            "top_logprobs_num": self.top_k,
            "token_ids_logprob": list(self.extra_ids) or None,
        }


@dataclass(frozen=True)
class SequenceScores:
    """Log-probabilities at temperature 1, one entry per scored token; lists not requested are
    empty."""

    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]  # most probable first
    top_logprobs: tuple[tuple[float, ...], ...]
    extra_logprobs: tuple[tuple[float, ...], ...]  # in the order of extra_ids


def require_in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that would crash SGLang's scheduler.

    Raises:
        UserError: an id is outside [0, vocab_size).
    """
    outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UserError(
            f"token id {outside} is outside the server's vocabulary of {vocab_size}: not sent; "
            "the tokenizer belongs to another model"
        )


class SglangClient:
    """Requests to one server. A machine that sends no packet for SILENCE_SECONDS is unreachable,
    whatever the request's own time-out."""

    def __init__(
        self, url: str, *, api_key: str | None = None, request_timeout_seconds: float = 600.0
    ) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._timeout = request_timeout_seconds
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(request_timeout_seconds, connect=10.0, pool=None)
        transport = httpx.HTTPTransport(
            limits=_CONNECTIONS, trust_env=False, socket_options=_TCP_KEEPALIVE
        )
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            transport=transport,
            trust_env=False,
        )
        self._streams: WeakSet[Any] = WeakSet()  # httpcore's, of the connections

    def copy(self) -> SglangClient:
        """The same address over new connections."""
        return SglangClient(self.url, api_key=self.api_key, request_timeout_seconds=self._timeout)

    def close(self) -> None:
        """Drop every connection; requests in flight fail at once as unreachable."""
        for stream in list(self._streams):
            with suppress(OSError):  # already closed
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._http.close()

    def is_healthy(self, timeout_seconds: float = 20.0) -> bool:
        """Whether the server's scheduler answers; SGLang draws one token for it, in a second."""
        try:
            return self._send("GET", "/health", None, timeout_seconds).status_code == 200
        except ServerFailure:
            return False

    def weight_version(self) -> str:
        """The version of the last publish; "default" before the first."""
        return str(self.call("GET", "/model_info").get("weight_version"))

    def release(self) -> str:
        """SGLang's version, e.g. "0.5.23"."""
        return str(self._server_info("version"))

    def tensor_ranks(self) -> int:
        """The number of the server's tensor-parallel ranks."""
        return int(self._server_info("tp_size"))

    def _server_info(self, key: str) -> Any:
        reply = self.call("GET", "/server_info", timeout_seconds=30.0)
        if not isinstance(reply, dict) or not isinstance(reply.get(key), str | int):
            raise self._garbage(f"/server_info states no {key}")
        return reply[key]

    def generate(self, request: Generation, attempts: int = 2) -> list[Completion]:
        """`num_samples` responses to one prompt, which is computed once for all of them.

        After a 5xx or an unusable reply the request is repeated, up to `attempts` times in all.

        Raises:
            ServerFailure: no usable reply.
            RefusedRequest: the server refuses the request.
        """
        payload = request.payload()
        retrying = Retrying(
            retry=retry_if_exception_type(_Transient),
            stop=stop_after_attempt(attempts),
            wait=wait_exponential_jitter(initial=0.2, max=2.0),
            reraise=True,
        )
        return retrying(self._generate_once, request, payload)

    def _generate_once(self, request: Generation, payload: dict[str, Any]) -> list[Completion]:
        reply = self.call("POST", "/generate", payload)
        responses = reply if isinstance(reply, list) else [reply]
        if len(responses) != request.num_samples:
            raise self._garbage(f"{len(responses)} responses, requested {request.num_samples}")
        return [self._completion(response, request) for response in responses]

    def score(self, request: Scoring) -> SequenceScores:
        """The served model's scores of a sequence's tokens from `start` on, at temperature 1.

        Raises:
            ServerFailure, RefusedRequest: as for `generate`.
            UserError: an id is outside the vocabulary; nothing is sent.
        """
        reply = self.call("POST", "/generate", request.payload())
        try:
            meta = reply["meta_info"]
            entries = meta["input_token_logprobs"][1:]
            logprobs = tuple(float(value) for value, _, _ in entries)
            ids = tuple(token for _, token, _ in entries)
            tops = meta["input_top_logprobs"][1:] if request.top_k else []
            top_ids = tuple(tuple(int(token) for _, token, _ in row) for row in tops)
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
        if not _are_logprobs([*logprobs, *itertools.chain(*top_logprobs, *extra_logprobs)]):
            raise self._garbage("a score is not a log-probability")
        return SequenceScores(logprobs, top_ids, top_logprobs, extra_logprobs)

    def call(
        self,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Send one request and return its JSON reply; None if the reply is empty or plain text.

        Raises:
            ServerFailure: unreachable, too late, 5xx, 408 or 429, or not JSON.
            RefusedRequest: any other 4xx.
        """
        response = self._send(method, path, payload, timeout_seconds)
        if response.status_code >= 500 or response.status_code in _RETRYABLE_STATUSES:
            raise _Transient(self.url, "status", f"{path}: HTTP {response.status_code}")
        if response.status_code >= 400:
            raise RefusedRequest(self.url, path, response.status_code, response.text[:500])
        if path.partition("?")[0] in _PLAIN_TEXT or not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise self._garbage(f"{path}: not JSON: {response.text[:80]!r}") from error

    def _send(
        self,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None,
        timeout_seconds: float | None,
    ) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_seconds is None else timeout_seconds
        try:
            return self._http.request(
                method, path, json=payload, timeout=timeout, extensions={"trace": self._on_event}
            )
        except httpx.TimeoutException as error:
            raise ServerFailure(self.url, "timeout", f"{path}: {type(error).__name__}") from error
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed while in flight
            raise ServerFailure(self.url, "unreachable", f"{path}: {error!r}") from error

    def _on_event(self, event: str, info: Mapping[str, Any]) -> None:
        """httpcore calls it at every step of a request; it keeps new connections' sockets."""
        if event == "connection.connect_tcp.complete":
            self._streams.add(info["return_value"])

    def _completion(self, response: Any, request: Generation) -> Completion:
        try:
            meta = response["meta_info"]
            finish = meta["finish_reason"]["type"]
            if finish == "abort":
                raise ServerFailure(self.url, "aborted", str(meta["finish_reason"].get("message")))
            ids = tuple(int(token) for token in response["output_ids"])
            drawn = meta["output_token_logprobs"]
            logprobs = tuple(float(value) for value, _, _ in drawn)
            scored_ids = tuple(token for _, token, _ in drawn)
            spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
            versions = tuple(str(span["version"]) for span in spans)
            cached = int(meta.get("cached_tokens") or 0)
            if ids and ids[-1] in request.stop_token_ids:
                finish = "stop"  # SGLang states "length" for a stop token at max_new_tokens
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._garbage(f"not a response: {error!r}") from error
        defect = _defect(ids, scored_ids, logprobs, finish, request)
        if defect is not None:
            raise self._garbage(defect)
        return Completion(ids, logprobs, finish, versions, cached)

    def _garbage(self, detail: str) -> ServerFailure:
        return _Transient(self.url, "garbage", detail)


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
