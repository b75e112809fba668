"""A TCP connection for one HTTP request, with a deadline for all of it and a limit of its reply.

httpcore's own time-outs are per read, so a server that sends a byte now and then outlives them. Not
here: requests and replies (client.py).
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import httpcore

_BACKEND = httpcore.SyncBackend()
_CONNECT_SECONDS = 10.0
_WRITE_BYTES = 64 * 1024
SILENCE_SECONDS = 30  # until a machine whose kernel sends no TCP packets counts as unreachable
TCP_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS // 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000),
)


class TooLargeError(Exception):
    """A reply has more bytes than allowed."""


class Connection(httpcore.NetworkBackend, httpcore.NetworkStream):
    """httpcore's backend and its one stream.

    Args:
        timeout_seconds: of connecting, sending and reading together.
        max_bytes: of the reply with its headers; `read` raises TooLargeError beyond it.
    """

    def __init__(self, timeout_seconds: float, max_bytes: int) -> None:
        self._deadline = time.monotonic() + timeout_seconds
        self._bytes_left = max_bytes
        self._stream: httpcore.NetworkStream | None = None

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        seconds = min(_CONNECT_SECONDS, self._seconds_left(httpcore.ConnectTimeout))
        self._stream = _BACKEND.connect_tcp(host, port, seconds, local_address, socket_options)
        return self

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        seconds = self._seconds_left(httpcore.ConnectTimeout)
        self._stream = self._open().start_tls(ssl_context, server_hostname, seconds)
        return self

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        data = self._open().read(max_bytes, self._seconds_left(httpcore.ReadTimeout))
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise TooLargeError
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        for start in range(0, len(buffer), _WRITE_BYTES):
            seconds = self._seconds_left(httpcore.WriteTimeout)
            self._open().write(buffer[start : start + _WRITE_BYTES], seconds)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._open().get_extra_info(info)

    def shutdown(self) -> None:
        """Make a read or write in another thread fail at once."""
        if self._stream is not None:
            with suppress(OSError):  # already closed
                self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def _open(self) -> httpcore.NetworkStream:
        assert self._stream is not None, "httpcore connects first"
        return self._stream

    def _seconds_left(self, late: type[httpcore.TimeoutException]) -> float:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise late("the request's deadline has passed")
        return seconds
