"""The live view's server: what it answers, what it refuses, and files that change meanwhile."""

import http.client
import json
from contextlib import contextmanager
from threading import Thread

import pytest

from stable_opd_mcore.commands.report.chosen_runs import ReportRun
from stable_opd_mcore.commands.report.watch import WatchServer, run_state
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.monitoring.metric_sinks import JsonlSink
from tests.commands.report.make_run import HOSTILE, make_run


@contextmanager
def served(*runs):
    with WatchServer(runs, 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply, data


def found(server, path):
    reply, data = ask(server, path)
    assert reply.status == 200, data
    return json.loads(data)


def test_page_and_rollouts(tmp_path):
    run = make_run(tmp_path / "a-run", 30, text=HOSTILE)
    with served(run) as server:
        reply, page = ask(server, "/")
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"connect-src 'self'" in page
        assert b"<h1>a-run</h1>" in page
        (state,) = found(server, "/version")["runs"]
        assert (state["label"], state["steps"]) == ("a-run", [1, 30])
        first, second = found(server, "/rollouts?run=0&step=30&search=")
        assert (first["finish"], second["finish"]) == ("stop", "length")
        assert found(server, "/rollouts?run=0&step=30&search=ONERROR") == [first, second]
        assert found(server, "/rollouts?run=0&step=30&search=nowhere") == []
        shown = found(server, "/rollout?run=0&step=30&index=1")
        assert shown["answer"] == "2"
        assert "<img src=x onerror=fail()>" in shown["text"]
        assert "\u202e" not in shown["text"]


def test_only_this_machine_and_known_paths_are_answered(tmp_path):
    run = make_run(tmp_path / "run", 3)
    (tmp_path / "secret").write_text("secret")
    with served(run) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, "/", host=f"localhost:{port}")[0].status == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "localhost:1"):
            reply, data = ask(server, "/rollouts?run=0&step=1", host=host)
            assert reply.status == 421
            assert b"1+1" not in data
        for path in (
            "/../secret",
            "/%2e%2e/secret",
            "/metrics.jsonl",
            "//etc/passwd",
            "/rollouts/",
        ):
            reply, data = ask(server, path)
            assert reply.status == 404
            assert b"secret" not in data
        for query in ("run=1&step=1", "run=0&step=../1", "run=-1&step=1", "run=0&step=1e9", ""):
            assert ask(server, f"/rollouts?{query}")[0].status == 400
        assert ask(server, "/rollout?run=0&step=1&index=2")[0].status == 400
        assert ask(server, "/rollouts?" + "a=1&" * 50)[0].status == 400
        assert ask(server, "/rollouts?run=0&step=2")[0].status == 400  # not stored
        assert ask(server, "/", method="POST")[0].status == 501


def test_a_run_is_watched_from_before_its_start_over_a_restart(tmp_path):
    directory = tmp_path / "run"
    with served(directory) as server:
        page = ask(server, "/")[1]
        assert f"Waiting for the first step of {directory}.".encode() in page
        assert b'role="alert"' not in page
        assert found(server, "/version")["runs"][0]["step"] is None
        make_run(directory, 5)
        before = found(server, "/version")
        assert before["runs"][0]["step"] == 5
        assert b"Waiting for" not in ask(server, "/")[1]
        metrics = directory / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes() + b'{"step": 6, "loss/to')  # being written
        half = found(server, "/version")
        assert half["version"] != before["version"]
        assert half["runs"][0]["step"] == 5
        assert b'role="alert"' not in ask(server, "/")[1]
        sink = JsonlSink(metrics, first_step=3)  # resumed from the checkpoint of step 2
        sink.write(3, {"loss/total": 0.5, "time/total": 2.0})
        sink.close()
        state = found(server, "/version")["runs"][0]
        assert (state["step"], state["total"], state["left"] > 0) == (3, 800, True)
        metrics.write_text("{\n{}\n")
        assert b"line 1: not JSON" in ask(server, "/")[1]


def test_the_time_left_is_that_of_the_last_steps(tmp_path):
    run = make_run(tmp_path / "run", 0)
    sink = JsonlSink(run / "metrics.jsonl", first_step=1)
    for step in range(1, 41):
        sink.write(step, {"time/total": 100.0 if step <= 20 else 2.0})
    sink.close()
    state = run_state(ReportRun(run, "run", name="run"))
    assert (state["step"], state["total"], state["left"]) == (40, 800, 1520.0)


def test_a_port_that_is_taken_is_named(tmp_path):
    with (
        served(tmp_path) as server,
        pytest.raises(UserError, match=r"choose another one with --port"),
    ):
        WatchServer([tmp_path], server.server_port)
