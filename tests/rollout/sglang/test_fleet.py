"""How long a fleet waits for servers that do not answer. tests/integration has real servers."""

import errno
import itertools
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stable_opd_mcore.rollout.sglang.fleet as fleet_module
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.process import (
    ServerOptions,
    ServerStartError,
    SglangServer,
    free_port,
)
from tests.serving.http_server import Request, http_server


def absent_external(directory: Path) -> Member:
    """An external server at whose address nothing listens."""
    server = SglangServer(ServerOptions("python", "model"), directory / "server.log")
    return Member("server_0", server.client(), None)


def silent_owned(directory: Path) -> Member:
    """A server of this run whose process lives and never answers."""
    program = directory / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    options = ServerOptions(str(program), "model", port=free_port("127.0.0.1"))
    server = SglangServer(options, directory / "server.log")
    return Member("server_0", server.client(), server)


@pytest.mark.parametrize("member", [absent_external, silent_owned])
def test_a_requested_stop_ends_waiting_for_a_server(member, tmp_path):
    requested = itertools.chain([False], itertools.repeat(True))  # true from the second call on
    fleet = Fleet(
        [member(tmp_path)],
        EventLog(tmp_path / "events.jsonl"),
        stop_requested=lambda: next(requested),
    )
    fleet.start()
    assert fleet.lost is not None
    assert fleet.lost.startswith("server_0 does not start")
    server = fleet.members[0].server
    assert server is None or not server.is_running
    fleet.stop()


class SlowToEnd:
    """A server of this run that ends when it is let; as a killed one that holds a GPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ending, self.may_end = threading.Event(), threading.Event()

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.ending.set()
        assert self.may_end.wait(30)
        self.log.append("stop")

    def wait_until_healthy(self, give_up: object) -> None:
        raise ServerStartError("for the test")


def failing(path: Path, server: SlowToEnd) -> tuple[Fleet, threading.Thread]:
    """A fleet whose only server another thread ends, as that of the health probes does."""
    member: Any = Member("server_0", SglangClient("http://127.0.0.1:9"), server)  # type: ignore[arg-type]
    fleet = Fleet([member], EventLog(path / "events.jsonl"))
    thread = threading.Thread(target=fleet.fail, args=(member_in_use(member), "hung"), daemon=True)
    thread.start()
    assert server.ending.wait(30)
    return fleet, thread


def test_a_server_that_is_being_ended_counts_as_restarting(tmp_path):
    server = SlowToEnd()
    fleet, _ = failing(tmp_path, server)
    threading.Timer(0.2, server.may_end.set).start()
    assert fleet.is_restarting
    server = SlowToEnd()
    fleet, _ = failing(tmp_path, server)
    threading.Timer(0.2, server.may_end.set).start()
    fleet.await_restarts()
    assert fleet.lost == "server_0 does not start: for the test"


def test_no_server_is_started_after_the_fleet_has_stopped(tmp_path):
    server = SlowToEnd()
    fleet, failure = failing(tmp_path, server)
    threading.Timer(0.2, server.may_end.set).start()
    fleet.stop()
    failure.join(30)
    assert server.log == ["stop", "stop"]


def test_a_server_that_cannot_be_started_again_loses_the_fleet(tmp_path):
    class Unstartable(SlowToEnd):
        def start(self) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    server = Unstartable()
    fleet, failure = failing(tmp_path, server)
    server.may_end.set()
    failure.join(30)
    assert fleet.lost == "server_0 cannot be restarted: [Errno 12] Cannot allocate memory"


def test_restarts_are_counted_in_a_window_of_time(tmp_path, monkeypatch):
    """Restarts before the window do not count: in a window of no time, then in an hour's."""
    member = silent_owned(tmp_path)
    monkeypatch.setattr(fleet_module, "MAX_RESTARTS", 1)
    fleet = Fleet([member], EventLog(tmp_path / "events.jsonl"))
    fleet.fail(member_in_use(member), "first")
    monkeypatch.setattr(fleet_module, "RESTART_WINDOW_MINUTES", 0.0)
    fleet.fail(member_in_use(member), "second")
    assert fleet.lost is None
    monkeypatch.setattr(fleet_module, "RESTART_WINDOW_MINUTES", 60.0)
    fleet.fail(member_in_use(member), "third")
    limit = "server_0 failed after 1 restarts in 60 minutes, which is the limit (third)"
    assert fleet.lost == limit
    fleet.stop()


def member_in_use(member: Member) -> Member:
    member.state = "ready"
    return member


def fleet_of(path: Path, *urls: str) -> Fleet:
    """External servers that are ready."""
    members = [
        Member(f"server_{n}", SglangClient(u), None, state="ready") for n, u in enumerate(urls)
    ]
    return Fleet(members, EventLog(path / "events.jsonl"))


def test_too_old_a_release_is_refused_before_any_weights(tmp_path):
    reply = (200, b'{"version": "0.5.22.post1", "tp_size": 1}')
    with http_server(lambda _: reply) as url:
        fleet = fleet_of(tmp_path, url)
        fleet.fail(fleet.members[0], "for the test")
        fleet.await_restarts()
    assert "runs SGLang 0.5.22.post1; 0.5.23 or later is needed" in str(fleet.lost)
    assert "install 0.5.23 where rollout.sglang.python points" in str(fleet.lost)


def test_the_gpu_is_given_to_the_trainer_and_back(tmp_path, monkeypatch):
    """Weights are sent again afterwards. A server that does not release its memory has failed."""
    monkeypatch.setattr(timeouts, "START", 0.1)
    paths: list[str] = []

    def reply(request: Request) -> tuple[int, bytes]:
        paths.append(request.path)
        return 200, b"{}"

    with http_server(reply) as url, http_server(lambda _: (500, b"")) as refuses:
        fleet = fleet_of(tmp_path, url)
        fleet.release_memory()
        fleet.weights_outdated(fleet.members[0])
        assert fleet.members[0].state == "released"
        fleet.resume_memory()
        assert fleet.members[0].state == "needs_weights"
        other = fleet_of(tmp_path, refuses)
        other.release_memory()
    assert paths == ["/release_memory_occupation", "/resume_memory_occupation"]
    assert other.lost is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_probes_count_from_the_first_answer_on(tmp_path, monkeypatch):
    """Before it a server may be compiling kernels; the request's own time-out ends the wait."""
    no_process = OSError("no process can be started")
    answers = iter([no_process, *[False] * 4, True, no_process, *[False] * 2])

    @dataclass
    class Client:
        def is_healthy(self, timeout_seconds: float) -> bool:
            if isinstance(answer := next(answers), OSError):
                raise answer
            return answer

        def close(self) -> None:
            pass

    member = silent_owned(tmp_path)
    member.client, member.state, member.in_flight = Client(), "ready", 1  # type: ignore[assignment]
    monkeypatch.setattr(timeouts, "HEALTH_INTERVAL", 0.02)
    monkeypatch.setattr(fleet_module, "MAX_RESTARTS", 0)
    fleet = Fleet([member], EventLog(tmp_path / "events.jsonl"))
    for _ in range(1500):
        fleet.watch()  # as each step does: an error ends the thread
        if fleet.lost is not None:
            break
        time.sleep(0.02)
    fleet.stop()
    assert fleet.lost is not None
    assert "hung: 2 health probes went unanswered" in fleet.lost
    assert list(answers) == []
