"""HTTP to one server: a request over a connection of its own, with a deadline for all of it.

Not here: what SGLang is asked and what it replies (client.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
from concurrent.futures import CancelledError, Future

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
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",  # a compressed reply could be of any size
            "Connection": "close",
        }
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url
        self._loop = _event_loop()
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=timeouts.CONNECT),
            transport=httpx.AsyncHTTPTransport(
                verify=url.startswith("https:"),  # reads the certificates only where it is needed
                limits=httpx.Limits(max_keepalive_connections=0),
                socket_options=_TCP_KEEPALIVE,
            ),
        )
        self._is_closed = False
        self._requests: set[Future[tuple[int, bytes]]] = set()  # in flight

    def close(self) -> None:
        """Send no more requests; those in flight fail at once as unreachable."""
        self._is_closed = True
        for request in list(self._requests):
            request.cancel()

    def send(
        self, method: str, path: str, body: str | None, timeout_seconds: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """Status and content of the reply.

        Raises:
            ServerFailure: unreachable, too late, or more than `max_bytes`.
        """
        exchange = self._exchange(method, path, body, timeout_seconds, max_bytes)
        request = asyncio.run_coroutine_threadsafe(exchange, self._loop)
        self._requests.add(request)
        if self._is_closed:
            request.cancel()
        try:
            return request.result()
        except CancelledError as error:
            detail = f"{path}: the client is closed"
            raise ServerFailure(self._url, "unreachable", detail) from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerFailure(self._url, "timeout", f"{path}: {error!r}") from error
        except httpx.TransportError as error:
            broken = not isinstance(error, httpx.ConnectError)
            detail = f"{path}: {error!r}"
            raise ServerFailure(self._url, "unreachable", detail, transient=broken) from error
        finally:
            self._requests.discard(request)

    async def _exchange(
        self, method: str, path: str, body: str | None, timeout_seconds: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """As `send`. httpx's own time-outs are per read: a server that sends a byte now and then
        outlives them."""
        content = bytearray()
        async with (
            asyncio.timeout(timeout_seconds),
            self._http.stream(method, self._url + path, content=body) as reply,
        ):
            async for piece in reply.aiter_raw():
                content += piece
                if len(content) > max_bytes:
                    detail = f"{path}: more than {max_bytes} bytes"
                    raise ServerFailure(self._url, "garbage", detail)
        return reply.status_code, bytes(content)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process's requests, in a thread of its own. Two callers at the same time may
    get two loops, which does no harm: a client keeps to its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop
