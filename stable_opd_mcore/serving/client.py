"""Requests to one SGLang server, in token ids. Safe to use from many threads.

They are sent by another process (http_process.py): `submit` returns at once, everything else blocks
until the reply is there. Not here: checking replies (replies.py), choosing a server, restarts,
redrawing (rollout/sglang/fleet.py), weights (rollout/sglang/sync.py).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from typing import Any, overload

from stable_opd_mcore.records import SequenceScores
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.exchange import RefusedRequest as RefusedRequest
from stable_opd_mcore.serving.exchange import Server
from stable_opd_mcore.serving.exchange import ServerFailure as ServerFailure
from stable_opd_mcore.serving.exchange import pause_seconds as pause_seconds
from stable_opd_mcore.serving.http_process import HTTP
from stable_opd_mcore.serving.requests import (
    MAX_REPLY_BYTES,
    Call,
    Completion,
    Generation,
    Scoring,
)

ATTEMPTS = 6  # for requests that may be repeated
_log = logging.getLogger("stable_opd_mcore.serving")
_numbers = itertools.count()


@dataclass(eq=False, repr=False)  # no log shows the key
class SglangClient:
    """Requests to one server. Safe to use from many threads."""

    url: str
    _: KW_ONLY
    api_key: str | None = None

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self.number = next(_numbers)  # of this client, in the process that sends its requests

    @property
    def server(self) -> Server:
        return Server(self.url, self.api_key)

    def close(self) -> None:
        """Send no more requests; those in flight fail at once as unreachable."""
        HTTP.close_client(self.number)

    @overload
    def submit(
        self, request: Generation, timeout_seconds: float | None = None, delay_seconds: float = 0.0
    ) -> Future[Completion]: ...
    @overload
    def submit(
        self, request: Scoring, timeout_seconds: float | None = None, delay_seconds: float = 0.0
    ) -> Future[SequenceScores]: ...
    @overload
    def submit(
        self, request: Call, timeout_seconds: float | None = None, delay_seconds: float = 0.0
    ) -> Future[Any]: ...
    def submit(
        self,
        request: Generation | Scoring | Call,
        timeout_seconds: float | None = None,
        delay_seconds: float = 0.0,
    ) -> Future[Any]:
        """Send a request once, and do not wait for its reply.

        Cancelling the future ends the request. What a callback of the future may do: see
        http_process.py.

        Args:
            timeout_seconds: of the whole exchange; None: timeouts.REQUEST.
            delay_seconds: it is sent so much later, as `pause_seconds` says before an attempt.

        Raises (the future):
            ServerFailure: unreachable, too late, 5xx, 408 or 429, too long, or a reply that cannot
                be used.
            RefusedRequest: any other 4xx.
            UserError: an id is outside the vocabulary; nothing is sent.
        """
        seconds = timeout_seconds or timeouts.REQUEST
        return HTTP.submit("send", self.number, self.server, request, seconds, delay_seconds)

    def is_healthy(self, timeout_seconds: float = timeouts.PROBE) -> bool:
        """Whether the server's scheduler answers; SGLang draws one token for it, in a second."""
        try:
            self.submit(Call("GET", "/health"), timeout_seconds).result()
        except (ServerFailure, RefusedRequest):
            return False
        return True

    def weight_version(self) -> str:
        """The version of the last publish; "default" before the first."""
        return str(self._stated("/model_info", "weight_version"))

    def release(self) -> str:
        """SGLang's version, e.g. "0.5.23"."""
        return str(self._stated("/server_info", "version"))

    def tensor_ranks(self) -> int:
        """The number of the server's tensor-parallel ranks."""
        return int(self._stated("/server_info", "tp_size"))

    def capacity(self) -> int:
        """The number of responses that the server draws at a time."""
        reply = self.call("GET", "/server_info", None, timeouts.QUESTION, attempts=ATTEMPTS)
        try:
            states = reply["internal_states"]  # one of each of the server's replicas
            return sum(_whole_number(s["effective_max_running_requests_per_dp"]) for s in states)
        except (KeyError, TypeError, ValueError) as error:
            raise self.garbage(f"/server_info states no capacity: {error!r}") from error

    def _stated(self, path: str, key: str) -> str | int:
        reply = self.call("GET", path, None, timeouts.QUESTION, attempts=ATTEMPTS)
        if not isinstance(reply, dict) or not isinstance(reply.get(key), str | int):
            raise self.garbage(f"{path} states no {key}")
        return reply[key]

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of a prompt's tokens the prefix cache holds; afterwards it holds them all."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": list(token_ids), "sampling_params": sampling}
        reply = self.call("POST", "/generate", body, timeouts.QUESTION, attempts=ATTEMPTS)
        try:
            return _whole_number(reply["meta_info"]["cached_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise self.garbage(f"no cached_tokens: {error!r}") from error

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
            timeout_seconds: of the whole exchange; None: timeouts.REQUEST.
            max_bytes: a longer reply is refused.
            attempts: how often the request is sent if it fails in a transient way; more than one
                only for requests that may be repeated.

        Raises:
            ServerFailure, RefusedRequest: as for `submit`.
        """
        request, attempt = Call(method, path, payload, max_bytes), 0
        while True:
            attempt += 1
            try:
                return self.submit(request, timeout_seconds).result()
            except ServerFailure as failure:
                if not failure.transient or attempt == attempts:
                    raise
                _log.warning("%s; attempt %d of %d", failure, attempt, attempts)
                time.sleep(pause_seconds(attempt))

    def garbage(self, detail: str) -> ServerFailure:
        """The failure of a reply that cannot be used."""
        return ServerFailure(self.url, "garbage", detail, transient=True)


def _whole_number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value
