"""One HTTP request, over a connection of its own, as a coroutine with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
import socket
import ssl
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.requests import Request

_TCP_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, timeouts.SILENCE // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timeouts.SILENCE // 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeouts.SILENCE * 1000),
)
_READ_BYTES = 2**20
_MAX_PAUSE_SECONDS = 2.0
# A passing shortage on this machine, not on the server
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


class ServerFailure(RuntimeError):
    """`kind`: unreachable, timeout, status, garbage or aborted; `transient`: worth repeating."""

    def __init__(self, url: str, kind: str, detail: str, transient: bool = False) -> None:
        super().__init__(url, kind, detail, transient)  # all, so that it can be pickled
        self.url = url
        self.kind = kind
        self.detail = detail
        self.transient = transient

    def __str__(self) -> str:
        return f"{self.url}: {self.kind}: {self.detail}"


class RefusedRequest(UserError):
    """The server refuses the request (HTTP 4xx); repeating it cannot help."""

    def __init__(self, url: str, path: str, status: int, detail: str) -> None:
        super().__init__(url, path, status, detail)
        self.status = status

    def __str__(self) -> str:
        url, path, status, detail = self.args
        return f"{url}{path}: HTTP {status}: {detail}; see the server's log (401: api_key_file)"


class Server(NamedTuple):
    """Where requests go. Not printed: it has the key."""

    url: str
    api_key: str | None


def pause_seconds(attempt: int) -> float:
    """The pause after the failed attempt number `attempt`, from 1: doubling, with jitter."""
    return min(_MAX_PAUSE_SECONDS, 0.1 * 2**attempt) * random.uniform(0.5, 1.0)


async def exchange(
    server: Server,
    request: Request[Any],
    timeout_seconds: float,
    connecting: asyncio.Semaphore | None = None,
) -> tuple[int, bytearray]:
    """Status and content of the reply, or ServerFailure. `connecting` bounds how many connections
    are opened at a time.

    SGLang closes idle connections after 5 s, and a request sent at that moment is lost, so none is
    kept. A machine that sends no packet for timeouts.SILENCE is unreachable, whatever the deadline.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _exchange(server, request, connecting)
    except TimeoutError as error:
        detail = f"{request.path}: no reply within {timeout_seconds:g} s"
        raise ServerFailure(server.url, "timeout", detail) from error


async def _exchange(
    server: Server, request: Request[Any], connecting: asyncio.Semaphore | None
) -> tuple[int, bytearray]:
    parts, path, body = urlsplit(server.url), request.path, request.body()
    async with connecting or contextlib.nullcontext():
        reader, writer = await _connected(server.url, path)
    try:
        for option in _TCP_KEEPALIVE:
            writer.get_extra_info("socket").setsockopt(*option)
        headers = [
            ("Host", parts.netloc.rpartition("@")[2]),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Accept-Encoding", "identity"),  # a compressed reply could be of any size
            ("Connection", "close"),
        ]
        if server.api_key is not None:
            headers.append(("Authorization", f"Bearer {server.api_key}"))
        protocol = h11.Connection(h11.CLIENT)
        head = h11.Request(method=request.method, target=parts.path + path, headers=headers)
        writer.write(b"".join(filter(None, map(protocol.send, (head, h11.Data(data=body))))))
        protocol.send(h11.EndOfMessage())  # a request of known length ends without a byte
        return await _reply(server.url, path, reader, protocol, request.max_reply_bytes)
    except (OSError, h11.RemoteProtocolError) as error:
        detail = f"{path}: {error!r}"
        raise ServerFailure(server.url, "unreachable", detail, transient=True) from error
    finally:
        writer.transport.abort()


async def _connected(url: str, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    tls = _certificates() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    try:
        async with asyncio.timeout(timeouts.CONNECT):
            return await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=_READ_BYTES)
    except TimeoutError as error:  # first, because it is an OSError too
        detail = f"{path}: no connection within {timeouts.CONNECT:g} s"
        raise ServerFailure(url, "timeout", detail, transient=True) from error
    except OSError as error:
        lacks = error.errno in _SHORTAGES
        raise ServerFailure(url, "unreachable", f"{path}: {error!r}", transient=lacks) from error


async def _reply(
    url: str, path: str, reader: asyncio.StreamReader, protocol: h11.Connection, max_bytes: int
) -> tuple[int, bytearray]:
    status, content = 0, bytearray()
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            protocol.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            content += event.data
            if len(content) > max_bytes:
                raise ServerFailure(url, "garbage", f"{path}: more than {max_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return status, content
        elif not isinstance(event, h11.InformationalResponse):
            raise ServerFailure(url, "garbage", f"{path}: not a reply: {event!r}")


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
