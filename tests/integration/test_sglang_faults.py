"""Training runs whose servers, started by the run itself, are killed and stopped under it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.sglang_tools import (
    Process,
    events,
    needs_sglang,
    rollouts,
    rows,
    servers_of,
    train,
    training_command,
)

pytestmark = [needs_sglang, pytest.mark.cluster]
STEPS = 6
LARGER = (  # eight buckets of weights, so that a sync has a middle
    "student.architecture.hidden_size=128",
    "student.architecture.intermediate_size=1024",
    "student.architecture.num_hidden_layers=4",
    "rollout.sglang.bucket_mib=1",
)


def test_killed_and_stopped_servers_lose_no_step(tmp_path):
    """SIGKILL to one server while it generates and to the other in the middle of a sync, then
    SIGSTOP: the run repairs itself, ends with every step done, and its log tells the story.
    """
    command = training_command(
        tmp_path,
        "faults",
        *LARGER,
        f"train.steps={STEPS}",
        "sampling.max_new_tokens=150",
        "rollout.sglang.num_servers=2",
        "rollout.sglang.max_restarts=5",
        "rollout.sglang.health_interval_seconds=4",
        "rollout.sglang.sync_timeout_seconds=30",
    )
    run = tmp_path / "faults"
    with Process(command, tmp_path / "output") as process:
        _await_step(process, run, 1)
        first, second = servers_of(process.pid)
        process.wait_until(_new_line(run, "server_0", "Prefill batch"), "generation")
        os.killpg(first, signal.SIGKILL)

        _await_step(process, run, 2)
        process.wait_until(_new_line(run, "server_1", "POST /update_weights_from"), "sync")
        os.killpg(second, signal.SIGKILL)

        _await_step(process, run, 4)
        restarted, _ = servers_of(process.pid)
        os.killpg(restarted, signal.SIGSTOP)
        assert process.wait() == 0, process.text[-3000:]

    done = rows(run)
    assert [row["step"] for row in done] == list(range(1, STEPS + 1))
    assert len({frozenset(row) for row in done}) == 1, "every step has the same metrics"
    for row in done:  # nothing lost, nothing counted twice
        drawn = rollouts(run, row["step"])
        assert len({(r["prompt_id"], r["sample_index"]) for r in drawn}) == len(drawn) == 32
        assert row["logprob/rollout_gap_max"] < 1e-4
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


def test_without_restarts_the_run_ends_clearly_and_resumes(tmp_path):
    settings = ("train.steps=4", "checkpoint.every=0")
    command = training_command(tmp_path, "lost", *settings, "rollout.sglang.max_restarts=0")
    run = tmp_path / "lost"
    with Process(command, tmp_path / "output") as process:
        _await_step(process, run, 1)
        (server,) = servers_of(process.pid)
        os.killpg(server, signal.SIGKILL)
        assert process.wait() == 2
        assert "error: server_0 failed and max_restarts is used up" in process.text
        assert "Traceback" not in process.text
    done = len(rows(run))
    assert 1 <= done < 4
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == [f"step_{done:06d}"]
    train(tmp_path, "lost", *settings)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]


def _await_step(process: Process, run: Path, step: int) -> None:
    process.wait_until(lambda: len(rows(run)) >= step, f"step {step}")


def _new_line(run: Path, server: str, text: str) -> Callable[[], bool]:
    """Whether the server has logged `text` since this was called."""
    log = run / "sglang" / f"{server}.log"
    start = log.stat().st_size

    def seen() -> bool:
        with log.open("rb") as file:
            file.seek(start)
            return text.encode() in file.read()

    return seen
