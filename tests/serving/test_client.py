"""Requests that no server answers; those that real servers answer are in tests/integration."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stable_opd_mcore.serving.client import ServerFailure, SglangClient


def test_closing_ends_a_request_in_flight():
    """A server that hangs is given up with all that waits for it, long before the timeouts."""
    with socket.create_server(("127.0.0.1", 0)) as hangs, ThreadPoolExecutor(1) as pool:
        client = SglangClient(f"http://127.0.0.1:{hangs.getsockname()[1]}")
        waiting = pool.submit(client.call, "POST", "/generate", {"input_ids": [1]})
        asked, _ = hangs.accept()
        with asked:
            while not asked.recv(1000).endswith(b"[1]}"):
                pass
            time.sleep(0.2)  # it waits for the answer by then; were it late, this could not fail
            began = time.monotonic()
            client.close()
            with pytest.raises(ServerFailure, match="unreachable"):
                waiting.result(60)
            assert time.monotonic() - began < 30
            assert not client.is_healthy()
