"""Training runs whose rollouts come from real SGLang servers, started by the run itself."""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.sglang_tools import (
    events,
    needs_sglang,
    rows,
    train,
    training_command,
)

pytestmark = [needs_sglang, pytest.mark.cluster]


def test_trainer_and_servers_agree_after_every_sync(tmp_path):
    """Ten steps over two servers; then the same rollouts through a run without servers."""
    run = train(tmp_path, "served", "train.steps=10", "rollout.sglang.num_servers=2")
    served = rows(run)
    assert len(served) == 10
    assert max(row["logprob/rollout_gap_max"] for row in served) < 1e-4
    assert min(row["engine/sync_bytes"] for row in served) > 0
    published = [event["detail"] for event in events(run) if event["event"] == "published"]
    assert published == [f"version {v}" for v in range(11) for _ in range(2)]

    replay = train(
        tmp_path, "again", "train.steps=10", "rollout.engine=replay", f"rollout.replay_from={run}"
    )
    for ours, theirs in zip(served, rows(replay), strict=True):
        for key in ("loss/total", "grad_norm", "tokens/trained"):
            assert math.isclose(ours[key], theirs[key], rel_tol=1e-6), key


def test_dead_and_stopped_servers_lose_no_step(tmp_path):
    """SIGKILL to one server, SIGSTOP to the other: the run repairs itself and says so."""
    command = training_command(
        tmp_path,
        "faults",
        "train.steps=6",
        "sampling.max_new_tokens=150",
        "rollout.sglang.num_servers=2",
        "rollout.sglang.health_interval_seconds=3",
        "rollout.sglang.sync_timeout_seconds=20",
    )
    run = tmp_path / "faults"
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for_steps(process, run, 1)
        first, second = _servers_of(process.pid)
        os.killpg(first, signal.SIGKILL)
        _wait_for_steps(process, run, 3)
        os.killpg(second, signal.SIGSTOP)
        process.wait(300)
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "output").read_text()[-3000:]
    done = rows(run)
    assert [row["step"] for row in done] == list(range(1, 7))
    for row in done:  # nothing lost, nothing counted twice
        assert len((run / f"rollouts/step_{row['step']:06d}.jsonl").read_text().splitlines()) == 32
        assert row["logprob/rollout_gap_max"] < 1e-4
    story = [(event["event"], event["server"]) for event in events(run)]
    for server in ("server_0", "server_1"):
        assert ("failure", server) in story
        assert ("restart", server) in story
    assert sum(row["engine/restart"] for row in done) >= 2


def test_without_restarts_the_run_ends_clearly_and_resumes(tmp_path):
    command = training_command(
        tmp_path, "lost", "train.steps=4", "rollout.sglang.max_restarts=0", "checkpoint.every=0"
    )
    run = tmp_path / "lost"
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for_steps(process, run, 1)
        os.killpg(_servers_of(process.pid)[0], signal.SIGKILL)
        process.wait(200)
    finally:
        process.kill()
    message = (tmp_path / "output").read_text()
    assert process.returncode == 2
    assert "error: server_0 failed and max_restarts is used up" in message
    assert "Traceback" not in message
    assert list((run / "checkpoints").glob("step_*"))
    done = len(rows(run))
    train(tmp_path, "lost", "train.steps=4")
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert 1 <= done < 4


def test_one_step_off_trains_on_rollouts_one_version_old(tmp_path):
    """Rollouts drawn while the step before trains; the ratio is taken from their own
    probabilities.
    """
    settings = ("train.steps=3", "rollout.async_steps=1", "rollout.max_staleness=1")
    run = train(tmp_path, "ahead", *settings, "checkpoint.every=2")
    assert [_versions(run, step) for step in (1, 2, 3)] == [{0}, {0}, {1}]
    assert all(row["ratio/clip_share"] < 1 for row in rows(run))

    # interrupted after the checkpoint of step 2, with step 3's rollouts in flight
    held = (run / "in_flight/step_000002.jsonl").read_text()
    trained_on = (run / "rollouts/step_000003.jsonl").read_text()
    assert _token_ids(held) == _token_ids(trained_on)
    last_loss = rows(run)[-1]["loss/total"]
    shutil.rmtree(run / "checkpoints/step_000003")
    train(tmp_path, "ahead", *settings, "checkpoint.every=2")
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert rows(run)[-1]["loss/total"] == last_loss


def _token_ids(file: str) -> list[list[int]]:
    return [json.loads(line)["response_token_ids"] for line in file.splitlines()]


def _versions(run: Path, step: int) -> set[int]:
    lines = (run / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["weight_version"] for line in lines}


def _wait_for_steps(process: subprocess.Popen, run: Path, steps: int) -> None:
    deadline = time.monotonic() + 300
    file = run / "metrics.jsonl"
    while not file.exists() or len(rows(run)) < steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def _servers_of(owner: int) -> list[int]:
    """The process groups of the servers that `owner` started, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it ended while we looked
        if parent == owner and any(part.endswith(b"serve.py") for part in arguments):
            found.append(int(entry.name))
    return sorted(found)
