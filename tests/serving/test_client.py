"""The client against sockets and HTTP servers of this process; tests/integration has SGLang."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stable_opd_mcore.serving.client import ServerFailure, SglangClient


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
