"""The process that talks to servers: how it starts and ends, futures, text and large arrays."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import CancelledError

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.serving.channel import receive_message
from stable_opd_mcore.serving.client import ServerFailure, SglangClient
from stable_opd_mcore.serving.exchange import Server
from stable_opd_mcore.serving.http_process import HTTP, HttpProcess
from stable_opd_mcore.serving.requests import Call, Generation, Scoring
from tests.serving.fake_teacher import fake_teacher
from tests.serving.http_server import http_server
from tests.serving.test_replies import response_of

HEALTH = Call("GET", "/health")


@pytest.fixture
def silent():
    """The address of a server that takes connections and never replies."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_it_imports_neither_torch_nor_megatron():
    program = (
        "import sys, stable_opd_mcore.serving.http_worker; "
        "print({'torch', 'megatron', 'transformers', 'pydantic'} & sys.modules.keys())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stderr


@pytest.mark.parametrize("end", ["import os; os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_it_ends_with_its_parent_also_if_a_fork_holds_the_channel(end):
    program = f"""
        import os, time
        from stable_opd_mcore.serving.client import SglangClient
        from stable_opd_mcore.serving.http_process import HTTP
        SglangClient("http://127.0.0.1:9").is_healthy()
        fork = os.fork()
        if not fork:
            time.sleep(60)
        print(HTTP.pid, fork, flush=True)
        {end}
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker, fork = map(int, parent.stdout.readline().split())
    parent.wait(60)
    deadline = time.monotonic() + 30
    try:
        while psutil.pid_exists(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(worker)
    finally:
        os.kill(fork, signal.SIGKILL)
        parent.stdout.close()


def test_signals_for_the_trainer_do_not_end_it():
    with http_server(lambda _: (200, b"{}")) as url:
        client = SglangClient(url)
        assert client.is_healthy()
        pid = HTTP.pid
        assert pid is not None
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, name)
        assert client.is_healthy()
        assert HTTP.pid == pid


def test_after_it_was_killed_its_requests_are_transient_failures_and_later_ones_are_sent(silent):
    reply = SglangClient(silent).submit(HEALTH)
    pid = HTTP.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    failure = reply.exception(30)
    assert isinstance(failure, ServerFailure)
    assert failure.transient
    assert "code -9" in failure.detail
    with http_server(lambda _: (200, b"{}")) as url:
        assert SglangClient(url).is_healthy()
    assert HTTP.pid not in (None, pid)


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize("moment", ["it gets the tokenizer", "it gets a request", "it answers"])
def test_no_request_waits_for_ever_if_the_process_ends_or_fails_as(moment, monkeypatch, caplog):
    def received(channel):
        message = receive_message(channel)
        if moment == "it gets the tokenizer" and message == (None, None):  # it is ready
            (worker,) = set(psutil.Process().children()) - before
            worker.kill()
            worker.wait()
        if moment == "it answers" and message != (None, None):
            int("no number")
        return message

    before = set(psutil.Process().children())
    http, body = HttpProcess(), None
    monkeypatch.setattr("stable_opd_mcore.serving.http_process.receive_message", received)
    if moment == "it gets the tokenizer":
        http.use_tokenizer("x" * 2**20)  # more than fits into the pipe
    elif moment == "it gets a request":
        body = {"a": Unreadable()}
    reply = http.submit(0, Server("http://127.0.0.1:9", None), Call("POST", "/a", body), 1.0)
    failure = reply.exception(30)
    assert isinstance(failure, ServerFailure), failure
    assert failure.transient
    assert "the next request starts another" in caplog.text
    http.end()


def test_a_process_that_cannot_start_is_an_error_of_the_first_request(monkeypatch, silent):
    program = "import resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, (200, 200)); "
    program += "from stable_opd_mcore.serving.http_worker import main; main(int(sys.argv[2]))"
    monkeypatch.setattr("stable_opd_mcore.host.worker_processes._PROGRAM", program)
    with pytest.raises(UserError, match=r"at least 512 open files.*limit of 200 .*ulimit -Hn"):
        HttpProcess().submit(0, Server(silent, None), HEALTH, 1.0)
    monkeypatch.setattr("stable_opd_mcore.host.worker_processes._PROGRAM", "raise SystemExit(3)")
    with pytest.raises(UserError, match="ended with code 3 as it started"):
        HttpProcess().submit(0, Server(silent, None), HEALTH, 1.0)


def test_a_cancelled_request_leaves_its_server():
    """The connection ends, by which SGLang aborts the response."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = SglangClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        reply = client.submit(HEALTH)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            assert connection.recv(1000)
            assert reply.cancel()
            assert connection.recv(1000) == b""
    with pytest.raises(CancelledError):
        reply.result()


def test_a_delayed_request_is_sent_later():
    came = []
    with http_server(lambda _: (came.append(time.monotonic()), (200, b"{}"))[1]) as url:
        client = SglangClient(url)
        client.call("GET", "/first")
        sent = time.monotonic()
        client.submit(HEALTH, delay_seconds=0.3).result()
    assert came[1] - sent >= 0.3


def test_requests_beyond_the_open_files_wait_for_their_turn(silent, monkeypatch):
    """The process may open 600 files; 700 requests to a silent server, then one to another."""
    program = "import resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, (600, 600)); "
    program += "from stable_opd_mcore.serving.http_worker import main; main(int(sys.argv[2]))"
    monkeypatch.setattr("stable_opd_mcore.host.worker_processes._PROGRAM", program)
    process, request = HttpProcess(), Generation((1,), Sampling(), 5)
    full = [process.submit(0, Server(silent, None), request, 600.0) for _ in range(700)]
    with http_server(lambda _: (200, b"{}")) as url:
        server = Server(url, None)
        process.submit(1, server, HEALTH, 60.0).result(60)
        later = process.submit(1, server, Generation((1,), Sampling(), 5), 60.0)
        process.close_client(0)
        assert "garbage: KeyError" in str(later.exception(60)), "it was sent, and {} is no response"
    assert {str(reply.exception(60)) for reply in full} == {
        f"{silent}: unreachable: the client is closed"
    }
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


def test_text_is_of_the_whole_response_without_its_stop_token():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate("abcdefgh")}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    HTTP.use_tokenizer(tokenizer.to_str())
    replies = iter(
        [response_of("stop", 3, 5), response_of("length", 3, 4), response_of("abort", 3)]
    )
    sampling = Sampling(max_new_tokens=2, stop_token_ids=(5,))
    request = Generation((1, 2, 6), sampling, 8, num_sampled=1)
    with http_server(lambda _: (200, json.dumps(next(replies)).encode())) as url:
        client = SglangClient(url)
        texts = [client.submit(request).result().text for _ in range(3)]
    assert texts == ["g d", "g d e", ""]


def test_large_arrays_of_scores_arrive_whole_and_writable():
    length, width = 4000, 40
    ids = [n % 50 for n in range(length + 1)]
    with fake_teacher() as (url, _):
        request = Scoring(ids, 1, 50, top_k=width, extra_ids=(1, 2))
        scores = SglangClient(url).submit(request).result()
    assert scores.top_logprobs_LK.shape == (length, width)
    assert scores.top_logprobs_LK.nbytes > 2**18
    assert (np.diff(scores.top_logprobs_LK, axis=1) <= 0).all()
    assert (np.sort(scores.top_ids_LK, axis=1) == np.arange(width)).all()
    assert scores.top_logprobs_LK.flags.writeable
