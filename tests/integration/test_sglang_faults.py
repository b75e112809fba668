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


@pytest.mark.parametrize(
    ("settings", "of_sync"),
    [
        ((), "POST /update_weights_from"),
        (("student.lora.rank=4", "optimizer.lr=0.02"), "POST /flush_cache"),  # an adapter follows
    ],
    ids=["weights", "factors"],
)
def test_killed_and_stopped_servers_lose_no_step(tmp_path, settings, of_sync):
    """SIGKILL to one server while it generates and to the other during a sync, then SIGSTOP."""
    command = training_command(
        tmp_path,
        "faults",
        *LARGER,
        *settings,
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
        process.wait_until(new_line(logs[1], of_sync), "sync")
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


def _await_step(process: Process, run: Path, step: int) -> None:
    process.wait_until(lambda: len(rows(run)) >= step, f"step {step}")
