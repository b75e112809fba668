"""Training runs whose own servers are killed and stopped."""

import os
import signal
from pathlib import Path

import pytest

from tests.integration.sglang_tools import (
    LARGER,
    Process,
    assert_nothing_lost,
    events,
    needs_sglang,
    new_line,
    rows,
    servers_of,
    training_command,
)

pytestmark = [needs_sglang, pytest.mark.cluster]
STEPS = 5


def test_killed_and_stopped_servers_lose_no_step(tmp_path):
    """SIGKILL to one server while it generates and to the other during a sync, then SIGSTOP."""
    command = training_command(
        tmp_path,
        "faults",
        *LARGER,
        f"train.steps={STEPS}",
        "sampling.max_new_tokens=150",
        "rollout.sglang.num_servers=2",
        "stable_opd_mcore.rollout.sglang.fleet.MAX_RESTARTS=5",
        "stable_opd_mcore.serving.timeouts.HEALTH_INTERVAL=4",
        "stable_opd_mcore.serving.timeouts.BUCKET=30",
    )
    run = tmp_path / "faults"
    logs = [run / f"sglang/server_{number}.log" for number in range(2)]
    with Process(command, tmp_path / "output") as process:
        _await_step(process, run, 1)
        first, second = servers_of(process.pid)
        process.wait_until(new_line(logs[0], "Prefill batch"), "generation")
        os.killpg(first, signal.SIGKILL)

        _await_step(process, run, 2)
        process.wait_until(new_line(logs[1], "POST /update_weights_from"), "sync")
        os.killpg(second, signal.SIGKILL)

        _await_step(process, run, 4)
        restarted, _ = servers_of(process.pid)
        os.killpg(restarted, signal.SIGSTOP)
        assert process.wait() == 0, process.text[-3000:]

    done = rows(run)
    assert [row["step"] for row in done] == list(range(1, STEPS + 1))
    assert len({frozenset(row) for row in done}) == 1, "every step has the same metrics"
    assert_nothing_lost(run)
    failures = [(e["server"], e["detail"]) for e in events(run) if e["event"] == "failure"]
    for server, beginning in (
        ("server_0", "unreachable: "),
        ("server_1", "weights did not arrive: "),
        ("server_0", "hung: "),
    ):
        assert [s for s, detail in failures if s == server and detail.startswith(beginning)]
    assert sum(row["engine/redrawn"] for row in done) > 0
    for server, least in (("server_0", 2), ("server_1", 1)):
        restarts = [e for e in events(run) if (e["event"], e["server"]) == ("restart", server)]
        assert len(restarts) >= least
        assert process.text.count(f"{server} restart: ") == len(restarts)


def test_a_server_killed_before_an_adapter_arrives_is_given_the_frozen_weights_too(tmp_path):
    command = training_command(
        tmp_path,
        "factors",
        *(*LARGER, "student.lora.rank=4", "optimizer.lr=0.02"),
        *("train.steps=3", "sampling.max_new_tokens=20", "rollout.sglang.num_servers=1"),
    )
    run = tmp_path / "factors"
    with Process(command, tmp_path / "output") as process:
        _await_step(process, run, 1)
        (server,) = servers_of(process.pid)
        flushed = new_line(run / "sglang/server_0.log", "POST /flush_cache")
        process.wait_until(flushed, "sync")  # the adapter follows
        os.killpg(server, signal.SIGKILL)
        assert process.wait() == 0, process.text[-3000:]
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert_nothing_lost(run)
    happened = [event["event"] for event in events(run)]
    assert happened.count("failure") >= happened.count("restart") == 1


def _await_step(process: Process, run: Path, step: int) -> None:
    process.wait_until(lambda: len(rows(run)) >= step, f"step {step}")
