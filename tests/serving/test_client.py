"""The client against sockets and HTTP servers of this process; tests/integration has SGLang."""

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stable_opd_mcore.serving.client import ServerFailure, SglangClient
from stable_opd_mcore.serving.requests import Scoring
from tests.serving.http_server import http_server


def read_request(connection: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data or (data[:4] == b"POST" and data.endswith(b"\r\n\r\n")):
        data += connection.recv(65536) or b"\r\n\r\n{}"


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yields the URL of a server that reads a request, then calls `serve(connection)`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        read_request(connection)
                        serve(connection)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_closing_fails_a_request_in_flight_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        client = SglangClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        reply = pool.submit(client.call, "POST", "/generate", {"input_ids": [1]})
        connection, _ = listener.accept()
        with connection:
            while not connection.recv(1000).endswith(b"[1]}"):
                pass
            time.sleep(0.2)  # until the client waits for the reply
            began = time.monotonic()
            client.close()
            with pytest.raises(ServerFailure, match="unreachable"):
                reply.result(60)
            assert time.monotonic() - began < 30
            assert not client.is_healthy()


def test_a_slow_reply_ends_at_the_requests_deadline():
    """A byte every 50 ms, first of the headers, then of the body: no single read is late."""

    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    with raw_server(drip) as url:
        began = time.monotonic()
        with pytest.raises(ServerFailure, match="timeout"):
            SglangClient(url, request_timeout_seconds=0.5).call("POST", "/generate", {})
        assert time.monotonic() - began < 3


def test_every_request_has_a_connection_of_its_own():
    """A server may close an idle connection while the next request is on its way."""

    def reply_once(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        connection.recv(65536)  # a second request on this connection gets no reply

    with raw_server(reply_once) as url:
        client = SglangClient(url)
        for _ in range(3):
            assert client.call("POST", "/generate", {}) == {}


def test_a_reset_is_repeated_on_a_new_connection():
    resets = iter([True, False])

    def reply(connection: socket.socket) -> None:
        if not next(resets):
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"version": "0.6"}')

    with raw_server(reply) as url:
        assert SglangClient(url).release() == "0.6"


def test_a_compressed_reply_is_not_decompressed():
    body = gzip.compress(b"{}")
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        raw_server(lambda connection: connection.sendall(head.encode() + body)) as url,
        pytest.raises(ServerFailure, match=f"{url}: garbage: .*not JSON"),
    ):
        SglangClient(url).call("POST", "/weights_checker", {})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "not JSON .RecursionError"),
        (b'{"a": 1e999}', "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b" " * (33 * 1024**2), "more than 33554432 bytes"),
    ],
)
def test_hostile_replies_are_refused_by_name(body, message):
    with (
        http_server(lambda path: (200, body)) as url,
        pytest.raises(ServerFailure, match=f"{url}: garbage: .*{message}"),
    ):
        SglangClient(url).call("POST", "/weights_checker", {})


@pytest.mark.parametrize("token", [5, -1, 2.5, 1e308])
def test_top_ids_outside_the_vocabulary_are_refused(token):
    meta = {
        "input_token_logprobs": [[None, 1, None], [-0.5, 2, None]],
        "input_top_logprobs": [None, [[-0.5, token, None]]],
    }
    reply = json.dumps({"meta_info": meta}).encode()
    with (
        http_server(lambda path: (200, reply)) as url,
        pytest.raises(ServerFailure, match=f"{url}: garbage"),
    ):
        SglangClient(url).score(Scoring((1, 2), 1, 5, top_k=1))
