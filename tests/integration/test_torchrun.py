"""launch/torchrun.sh: two ranks that a signal stops, and the files of a chain of stages."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
STEPS = 1000


def start(errors: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    command = ["launch/torchrun.sh", "train", "configs/smoke_cpu.yaml", *arguments]
    with errors.open("w") as file:
        return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | variables, stderr=file)


@pytest.mark.slow
def test_a_signal_stops_all_ranks_after_their_step(tmp_path):
    run, errors = tmp_path / "run", tmp_path / "errors.log"
    settings = (
        *(f"train.steps={STEPS}", "rollout.prompts_per_step=4", "sampling.max_new_tokens=16"),
        *("evaluation.every=0", "checkpoint.every=0", "monitoring.tensorboard=false"),
        *(f"run.directory={tmp_path}", "run.name=run"),
    )
    venv = str(Path(sys.executable).parents[1])
    running = start(errors, *settings, VENV=venv, RANKS="2", OMP_NUM_THREADS="1")
    deadline = time.monotonic() + 180
    while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").read_text():
        assert running.poll() is None, errors.read_text()[-3000:]
        assert time.monotonic() < deadline, errors.read_text()[-3000:]
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) != 0  # not zero, so that a chain of stages does not continue
    assert "stopped by SIGTERM; the same command resumes" in errors.read_text()
    step = json.loads((run / "REQUEUE").read_text())["step"]
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert f"stopped by SIGTERM after step {step}; ch" in errors.read_text()
    assert (run / "checkpoints" / f"step_{step:06d}" / "state.json").is_file()


def test_a_stage_starts_after_the_one_before_and_says_that_it_succeeded(tmp_path):
    """The ranks are played by a script that exits with the code CODE."""
    python, before, done = tmp_path / "bin/python", tmp_path / "before", tmp_path / "done"
    python.parent.mkdir()
    python.write_text("#!/bin/bash\nexit $CODE\n")
    python.chmod(0o755)
    variables = {"VENV": str(tmp_path), "AFTER": str(before), "DONE": str(done)}
    assert start(tmp_path / "log", CODE="0", **variables).wait(60) == 1
    assert (
        f"a stage before it did not succeed ({before} is missing)" in (tmp_path / "log").read_text()
    )
    before.touch()
    assert start(tmp_path / "log", CODE="3", **variables).wait(60) == 3
    assert not done.exists()
    assert start(tmp_path / "log", CODE="0", **variables).wait(60) == 0
    assert done.exists()


@pytest.mark.parametrize(
    ("visible", "ranks"), [(None, 4), ("1,3", 2), ("GPU-a", 1), ("", 1), ("-1", 1)]
)
def test_a_rank_starts_for_each_gpu_that_is_visible(visible, ranks, tmp_path):
    listed = "GPU {}: NVIDIA H200 (UUID: GPU-{})\n  MIG 1g.18gb Device 0: (UUID: MIG-{})\n"
    program = tmp_path / "nvidia-smi"
    text = "".join(listed.format(number, number, number) for number in range(4))
    program.write_text(f"#!/bin/bash\ncat <<END\n{text}END\n")
    program.chmod(0o755)
    variables = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "RANKS")}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    command = ["launch/torchrun.sh", "--dry-run", "train", "configs/smoke_cpu.yaml"]
    printed = subprocess.check_output(command, cwd=REPOSITORY, env=variables, text=True)
    assert f"--local-addr=localhost --nproc-per-node={ranks} " in printed
