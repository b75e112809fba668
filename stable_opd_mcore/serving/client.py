"""Requests to one SGLang server, in token ids. Safe to use from many threads.

Another process sends them (http_process.py): `submit` returns at once, everything else blocks until
the reply is there.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeVar

from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.exchange import RefusedRequest as RefusedRequest
from stable_opd_mcore.serving.exchange import Server
from stable_opd_mcore.serving.exchange import ServerFailure as ServerFailure
from stable_opd_mcore.serving.exchange import pause_seconds as pause_seconds
from stable_opd_mcore.serving.http_process import HTTP
from stable_opd_mcore.serving.requests import Call, Request

Reply = TypeVar("Reply")
ATTEMPTS = 6  # attempts at requests that may be repeated
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
        self._number = next(_numbers)  # identifies this client in the process that sends

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process is a client of its own."""
        return partial(SglangClient, api_key=self.api_key), (self.url,)

    def close(self) -> None:
        """Send no more requests; those in flight fail at once as unreachable."""
        HTTP.close_client(self._number)

    def submit(
        self,
        request: Request[Reply],
        timeout_seconds: float | None = None,
        delay_seconds: float = 0.0,
    ) -> Future[Reply]:
        """Send a request once, and do not wait for its reply. Cancelling the future ends it.

        http_process.py says what a callback of the future may do.

        Args:
            timeout_seconds: limit for the whole exchange; None: timeouts.REQUEST.
            delay_seconds: wait before the request is sent, see `pause_seconds`.

        Raises (the future):
            ServerFailure: unreachable, too late, 5xx, 408 or 429, too long, or a reply that cannot
                be used.
            RefusedRequest: any other 4xx.
            UserError: an id is outside the vocabulary; nothing is sent.
        """
        seconds, server = timeout_seconds or timeouts.REQUEST, Server(self.url, self.api_key)
        return HTTP.submit(self._number, server, request, seconds, delay_seconds)

    def is_healthy(self, timeout_seconds: float = timeouts.PROBE) -> bool:
        """Whether the server's scheduler answers; SGLang samples one token for it, in a second."""
        try:
            self.submit(Call("GET", "/health"), timeout_seconds).result()
        except (ServerFailure, RefusedRequest):
            return False
        return True

    def weight_version(self) -> str:
        """The version of the last publish; "default" before the first."""
        return self._read(lambda reply: str(reply["weight_version"]), "GET", "/model_info")

    def release(self) -> str:
        """SGLang's version, e.g. "0.5.23"."""
        return self._read(lambda reply: str(reply["version"]), "GET", "/server_info")

    def tensor_ranks(self) -> int:
        """The number of the server's tensor-parallel ranks."""
        return self._read(lambda reply: _integer(reply["tp_size"]), "GET", "/server_info")

    def capacity(self) -> int:
        """The number of responses that the server samples at a time, over its replicas."""
        key = "effective_max_running_requests_per_dp"
        return self._read(
            lambda reply: sum(_integer(state[key]) for state in reply["internal_states"]),
            *("GET", "/server_info"),
        )

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of a prompt's tokens the prefix cache holds; afterwards it holds them all."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {"input_ids": list(token_ids), "sampling_params": sampling}
        return self._read(
            lambda reply: _integer(reply["meta_info"]["cached_tokens"]), "POST", "/generate", body
        )

    def _read(
        self,
        read: Callable[[Any], Reply],
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> Reply:
        reply = self.call(method, path, body, timeouts.QUESTION, attempts=ATTEMPTS)
        try:
            return read(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise self.garbage(f"{path}: {type(error).__name__}: {error}") from error

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
        *,
        attempts: int = 1,
    ) -> Any:
        """Send a request and return its JSON reply; `attempts` > 1 only if it may be repeated."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return self.submit(Call(method, path, body), timeout_seconds).result()
            except ServerFailure as failure:
                if not failure.transient or attempt == attempts:
                    raise
                _log.warning("%s; attempt %d of %d", failure, attempt, attempts)
                time.sleep(pause_seconds(attempt))

    def garbage(self, detail: str) -> ServerFailure:
        """The failure of a reply that cannot be used."""
        return ServerFailure(self.url, "garbage", detail, transient=True)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value
