"""How long a fleet waits for servers that do not answer; tests/integration has real servers."""

import itertools
from pathlib import Path

import pytest

from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.rollout.sglang.events import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.serving.client import Completion, Generation
from stable_opd_mcore.serving.process import ServerOptions, SglangServer, free_port


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
        return [Completion((), (), "length", ("0",), 0)] * request.num_samples

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
    request = Generation((1,), 1, 1.0, 1.0, 4, (0,), vocab_size=8)
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
