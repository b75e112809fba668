"""Connections of the client against sockets of this process: deadlines, resets, closing."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stable_opd_mcore.serving.client import ServerFailure, SglangClient
from tests.serving.raw_server import raw_server


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
            SglangClient(url).call("POST", "/generate", {}, 0.5)
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


@pytest.mark.parametrize("sent", [0, 10, 45])
def test_a_reset_and_a_reply_cut_short_are_repeated(sent, caplog, monkeypatch):
    """Cut before the reply, in its headers and in its body. No log holds the key, and a proxy of
    the environment is not used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    reply = b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"version": "0.6"}'
    lengths = iter([sent, len(reply)])
    caplog.set_level("DEBUG")
    with raw_server(lambda connection: connection.sendall(reply[: next(lengths)])) as url:
        assert SglangClient(url, api_key="a key").release() == "0.6"
    assert "attempt 1 of 6" in caplog.text
    assert "a key" not in caplog.text
