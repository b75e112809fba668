"""The server of the page: what it answers, what it refuses, and files that change meanwhile."""

import http.client
from contextlib import contextmanager
from threading import Thread

import pytest

from stable_opd_mcore.commands.report.follow import ReportServer
from stable_opd_mcore.data.rollout_files import read_rollouts, write_rollouts
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import JsonlSink
from tests.commands.report.make_run import HOSTILE, make_run
from tests.commands.report.test_report import Page, rollouts_of


@contextmanager
def served(*runs):
    with ReportServer(runs, 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", host=None, method="GET", version=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    if version is not None:
        connection.putheader("If-None-Match", version)
    connection.endheaders()
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply, data


def test_only_this_machine_and_the_page_are_answered(tmp_path):
    run = make_run(tmp_path / "run", 3, text=HOSTILE)
    (tmp_path / "secret").write_text("secret")
    with served(run) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        reply, data = ask(server, host=f"localhost:{port}")
        assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b"connect-src 'self'" in data
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "localhost:1"):
            reply, data = ask(server, host=host)
            assert reply.status == 421
            assert b"run" not in data
        for path in ("/../secret", "/%2e%2e/secret", "/metrics.jsonl", "//etc/passwd", "/?a=1"):
            reply, data = ask(server, path)
            assert reply.status == 404
            assert b"secret" not in data
        assert ask(server, method="POST")[0].status == 501
        with pytest.raises(UserError, match=r"choose another one with --port"):
            ReportServer([tmp_path], port)


def test_a_run_is_followed_from_before_its_start_over_a_restart(tmp_path):
    directory = tmp_path / "run"
    with served(directory) as server:
        versions = set()

        def page(problem: bytes = b"") -> bytes:
            """The new page; the server says that a version stays as it is."""
            reply, data = ask(server)
            version = reply.headers["ETag"]
            assert version not in versions
            versions.add(version)
            assert ask(server, version=version)[0].status == 304
            assert (b'role="alert"' in data) == bool(problem)
            assert problem in data
            return data

        assert f"Waiting for the first step of {directory}.".encode() in page()
        make_run(directory, 5)
        data = page()
        assert b"Waiting for" not in data
        assert b"5 of 800" in data
        metrics = directory / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes() + b'{"step": 6, "loss/to')  # being written
        assert b"5 of 800" in page()
        sink = JsonlSink(metrics, first_step=3)  # resumed from the checkpoint of step 2
        sink.write(3, {"loss/total": 0.5, "time/total": 2.0})
        sink.close()
        assert b"3 of 800" in page()
        files = RunDirectory(directory)
        write_rollouts(files.rollouts(7), read_rollouts(files.rollouts(1)))
        found = rollouts_of(Page(page().decode()))
        assert [record["step"] for record in found["rollouts"]] == [1, 1, 5, 5, 7, 7]
        files.rollouts(8).write_text("{}\n")
        page(problem=b"column prompt_id is missing")
        metrics.write_text("{\n{}\n")
        page(problem=b"line 1: not JSON")
