"""Servers that do not answer: how long they are waited for. Real ones are in tests/integration."""

import itertools
from pathlib import Path

import pytest

from stable_opd_mcore.rollout.sglang.events import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.serving.process import ServerOptions, SglangServer, free_port


def nobody(directory: Path) -> Member:
    """Somebody else's server that is away."""
    server = SglangServer(ServerOptions("python", "model"), directory / "server.log")
    return Member("server_0", server.client(), None)


def silent(directory: Path) -> Member:
    """A server of ours whose process lives and never answers."""
    waits = directory / "python"
    waits.write_text("#!/bin/sh\nexec sleep 600\n")
    waits.chmod(0o700)
    options = ServerOptions(str(waits), "model", port=free_port("127.0.0.1"))
    server = SglangServer(options, directory / "server.log")
    return Member("server_0", server.client(), server)


@pytest.mark.parametrize("member", [nobody, silent])
def test_no_server_is_waited_for_once_a_stop_was_asked(member, tmp_path):
    asked = itertools.chain([False], itertools.repeat(True))  # after the first look
    fleet = Fleet(
        [member(tmp_path)],
        EventLog(tmp_path / "events.jsonl"),
        max_restarts=3,
        health_interval_seconds=1,
        startup_timeout_seconds=600,
        stop_asked=lambda: next(asked),
    )
    fleet.start()
    assert fleet.lost is not None
    assert fleet.lost.startswith("server_0 does not start")
    owned = fleet.members[0].server
    assert owned is None or not owned.is_running
    fleet.stop()
