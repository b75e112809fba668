"""HTTP to one server: a request over a connection of its own, with a deadline for all of it.

Not here: what SGLang is asked and what it replies (client.py).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

from stable_opd_mcore.serving import timeouts

_TCP_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, timeouts.SILENCE // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timeouts.SILENCE // 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeouts.SILENCE * 1000),
)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request


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


class Connections:
    """Sends requests to `url`. Safe to use from many threads.

    SGLang closes idle connections after 5 s, and a request sent at that moment is lost, so none is
    kept. A machine that sends no packet for timeouts.SILENCE is unreachable, whatever the request's
    own time-out.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.is_closed = False
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",  # a compressed reply could be of any size
            "Connection": "close",
        }
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url
        self._http = httpx.Client(
            headers=headers,
            transport=httpx.HTTPTransport(
                verify=url.startswith("https:"),  # reads the certificates only where it is needed
                limits=httpx.Limits(max_keepalive_connections=0),
                socket_options=_TCP_KEEPALIVE,
            ),
        )
        self._exchanges: set[_Exchange] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Send no more requests; those in flight fail at once as unreachable."""
        with self._lock:
            self.is_closed = True
            for exchange in self._exchanges:
                exchange.end("closed")

    def send(
        self, method: str, path: str, body: str | None, timeout_seconds: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """Status and content of the reply.

        Raises:
            ServerFailure: unreachable, too late, or more than `max_bytes`.
        """
        exchange = _Exchange()
        with self._lock:
            if self.is_closed:
                raise ServerFailure(self._url, "unreachable", f"{path}: the client is closed")
            self._exchanges.add(exchange)
        deadline = threading.Timer(timeout_seconds, exchange.end, ["late"])
        deadline.daemon = True
        deadline.start()
        try:
            content = bytearray()
            with self._http.stream(
                method,
                self._url + path,
                content=body,
                timeout=httpx.Timeout(None, connect=min(timeouts.CONNECT, timeout_seconds)),
                extensions={"trace": exchange.trace},
            ) as reply:
                for piece in reply.iter_raw():
                    content += piece
                    if len(content) > max_bytes:
                        detail = f"{path}: more than {max_bytes} bytes"
                        raise ServerFailure(self._url, "garbage", detail)
            if (
                exchange.ended is not None
            ):  # cut short, a reply without a stated length seems complete
                raise httpx.ReadError("the request was ended")
            return reply.status_code, bytes(content)
        except httpx.TransportError as error:
            is_late = exchange.ended == "late" or isinstance(error, httpx.TimeoutException)
            broken = not (is_late or self.is_closed or isinstance(error, httpx.ConnectError))
            kind = "timeout" if is_late else "unreachable"
            raise ServerFailure(self._url, kind, f"{path}: {error!r}", transient=broken) from error
        finally:
            deadline.cancel()
            with self._lock:
                self._exchanges.discard(exchange)


class _Exchange:
    """One request and its reply, which another thread can end.

    httpx's own time-outs are per read, so a server that sends a byte now and then outlives them.
    """

    def __init__(self) -> None:
        self.ended: str | None = None  # why
        self._socket: socket.socket | None = None

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """httpx calls it with each event of the connection."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.ended is not None:
                self.end(self.ended)

    def end(self, why: str) -> None:
        """Make the read or write that a thread waits in fail at once."""
        self.ended = why
        if self._socket is not None:
            with suppress(OSError):  # already closed
                self._socket.shutdown(socket.SHUT_RDWR)
