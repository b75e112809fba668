"""How long a fleet waits for servers that do not answer, and several leaders' views of one server.

tests/integration has real servers.
"""

import itertools
import json
import threading
import time
from pathlib import Path

import pytest

import stable_opd_mcore.rollout.sglang.fleet as fleet_module
from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member, ServerStatus, one_per_server
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.process import ServerOptions, SglangServer, free_port
from stable_opd_mcore.serving.requests import Completion, Generation
from tests.serving.http_server import Request, http_server

RESPONSE = {
    "output_ids": [2],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 2, None]],
        "weight_version": "0",
        "cached_tokens": 0,
    },
}


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


class Answering:
    """A client whose server answers every request with one empty response."""

    def generate(self, request: Generation) -> list[Completion]:
        return [Completion((), (), "length", ("0",), 0)] * request.sampling.num_samples

    def is_healthy(self, timeout_seconds: float) -> bool:
        return True


def test_each_accepted_answer_is_progress(tmp_path):
    answers = iter([False, True, True])
    progress = []
    fleet = Fleet(
        [Member("server_0", Answering(), None, state="ready")],  # type: ignore[arg-type]
        EventLog(tmp_path / "events.jsonl"),
        SglangConfig(),
        progress=lambda: progress.append(1),
    )
    request = Generation((1,), Sampling(max_new_tokens=4, stop_token_ids=(0,)), vocab_size=8)
    fleet.draw([request, request], lambda _, __: next(answers))
    assert len(progress) == 2


@pytest.mark.parametrize("member", [absent_external, silent_owned])
def test_a_requested_stop_ends_waiting_for_a_server(member, tmp_path):
    requested = itertools.chain([False], itertools.repeat(True))  # true from the second call on
    fleet = Fleet(
        [member(tmp_path)],
        EventLog(tmp_path / "events.jsonl"),
        SglangConfig(health_interval_seconds=1),
        stop_requested=lambda: next(requested),
    )
    fleet.start()
    assert fleet.lost is not None
    assert fleet.lost.startswith("server_0 does not start")
    server = fleet.members[0].server
    assert server is None or not server.is_running
    fleet.stop()


def test_restarts_are_counted_in_a_window_of_time(tmp_path, monkeypatch):
    """Two failures further apart than the window, then one at once after the second."""
    member = silent_owned(tmp_path)
    monkeypatch.setattr(fleet_module, "RESTART_WINDOW_MINUTES", 0.5 / 60)
    settings = SglangConfig(max_restarts=1)
    fleet = Fleet([member], EventLog(tmp_path / "events.jsonl"), settings)
    fleet.fail(member_in_use(member), "first")
    time.sleep(0.6)
    fleet.fail(member_in_use(member), "second")
    assert fleet.lost is None
    fleet.fail(member_in_use(member), "third")
    assert (
        fleet.lost == "server_0 failed and max_restarts is used up: 1 in 0.00833333 minutes (third)"
    )
    fleet.stop()


def member_in_use(member: Member) -> Member:
    member.state = "ready"
    return member


def request() -> Generation:
    return Generation((1, 2), Sampling(max_new_tokens=1, stop_token_ids=(2,)), vocab_size=5)


def fleet_of(path: Path, *urls: str) -> Fleet:
    """External servers that are ready."""
    members = [
        Member(f"server_{n}", SglangClient(u), None, state="ready") for n, u in enumerate(urls)
    ]
    settings = SglangConfig(max_restarts=0, startup_timeout_seconds=0.1)
    return Fleet(members, EventLog(path / "events.jsonl"), settings)


def happened(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()]


BROKEN = [
    (500, b""),
    (429, b"too many requests"),
    (200, b"<html>"),
    (200, b"[]"),
    (200, b'{"output_ids": [1e999]}'),
    (200, json.dumps(RESPONSE | {"output_ids": [4096]}).encode()),
    (200, json.dumps({"output_ids": [2], "meta_info": {}}).encode()),
]
GOOD = (200, json.dumps(RESPONSE).encode())


def test_broken_replies_are_repeated_and_counted(tmp_path, monkeypatch):
    """Half of the replies are broken in some way; every request is answered once."""
    monkeypatch.setattr(fleet_module, "pause_seconds", lambda attempt: 0.0)
    replies = itertools.chain.from_iterable((reply, GOOD) for reply in BROKEN)
    with http_server(lambda _: next(replies, GOOD)) as url:
        fleet = fleet_of(tmp_path, url)
        for _ in BROKEN:
            (answer,) = fleet.draw([request()], lambda *_: True)
            assert [completion.token_ids for completion in answer or ()] == [(2,)]
    assert next(replies, None) is None
    assert fleet.members[0].state == "ready"
    assert happened(tmp_path) == ["retried"] * len(BROKEN)


def test_a_failing_servers_requests_go_to_the_other_server(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_module, "pause_seconds", lambda attempt: 0.0)
    with http_server(lambda _: (502, b"")) as fails, http_server(lambda _: GOOD) as answers:
        fleet = fleet_of(tmp_path, fails, answers)
        assert None not in fleet.draw([request()] * 10, lambda *_: True)
    assert [member.state for member in fleet.members] == ["restarting", "ready"]
    kinds = happened(tmp_path)
    assert kinds.index("retried") < kinds.index("failure") < kinds.index("redrawn")
    assert "HTTP 502" in (tmp_path / "events.jsonl").read_text()


def test_without_a_server_a_request_has_no_answer(tmp_path):
    """Its only server's responses come from old weights, and are dropped."""
    with http_server(lambda _: GOOD) as url:
        fleet = fleet_of(tmp_path, url)

        def refuse(member: Member, answer: object) -> bool:
            fleet.weights_outdated(member)
            return False

        assert fleet.draw([request()], refuse) == [None]
    assert fleet.members[0].state == "needs_weights"


def test_too_old_a_release_is_refused_before_any_weights(tmp_path):
    reply = (200, b'{"version": "0.5.12.post1", "tp_size": 1}')
    with http_server(lambda _: reply) as url:
        fleet = fleet_of(tmp_path, url)
        fleet.fail(fleet.members[0], "for the test")
        fleet.await_restarts()
    assert "runs SGLang 0.5.12.post1; 0.5.13 or later is needed" in str(fleet.lost)
    assert "install it where rollout.sglang.python points" in str(fleet.lost)


def test_the_gpu_is_given_to_the_trainer_and_back(tmp_path):
    """Weights are sent again afterwards. A server that does not release its memory has failed."""
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


def test_a_server_that_compiles_does_not_count_as_hung(tmp_path, monkeypatch):
    """Its only answer comes when its compilers stand still; every probe before it is missed."""
    work = iter([True] * 4)
    answered = threading.Event()

    class Watch:
        def has_compiled(self) -> bool:
            return next(work, None) or bool(answered.set())

    class Compiling(Answering):
        def generate(self, request: Generation) -> list[Completion]:
            assert answered.wait(30)
            return super().generate(request)

        def is_healthy(self, timeout_seconds: float) -> bool:
            return False

    monkeypatch.setattr(fleet_module, "CompilerWatch", Watch)
    member = silent_owned(tmp_path)
    member.client, member.state = Compiling(), "ready"  # type: ignore[assignment]
    settings = SglangConfig(health_interval_seconds=0.05)
    fleet = Fleet([member], EventLog(tmp_path / "events.jsonl"), settings)
    assert fleet.draw([request()], lambda *_: True) != [None]
    assert member.state == "ready"


def status(name: str, state: str, life: int = 0, sender: int | None = 0) -> ServerStatus:
    return ServerStatus(name, f"http://{name}", "key", state, 1, life, sender)


def test_a_shared_server_is_sent_the_weights_once_if_any_leader_saw_that_it_lacks_them():
    seen = [status("a", "ready"), status("b", "ready"), status("a", "needs_weights", life=2)]
    assert one_per_server(seen) == [status("a", "needs_weights", life=2), status("b", "ready")]


def test_every_failure_that_a_leader_sees_changes_the_life():
    lives = ((0, 0), (1, 0), (1, 1))
    found = {
        one_per_server([status("a", "ready", first), status("a", "ready", second)])[0].life
        for first, second in lives
    }
    assert len(found) == len(lives)


def test_the_leader_that_started_a_server_sends():
    seen = [status("a", "ready", sender=None), status("a", "ready", sender=3)]
    assert [each.sender for each in one_per_server(seen)] == [3]
    assert one_per_server(seen[:1])[0].sender is None
