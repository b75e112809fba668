"""launch/torchrun.sh with two ranks: stopped by a signal, then completed by the same command."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
STEPS = 8


class Launch:
    """Starts the script and reads the files of its run."""

    def __init__(self, directory: Path):
        self.home = directory / "run"
        self.done = directory / "done"
        self.errors = directory / "errors.log"
        self._command = [
            *("launch/torchrun.sh", "train", "configs/smoke_cpu.yaml"),
            *(f"train.steps={STEPS}", "rollout.prompts_per_step=4", "sampling.max_new_tokens=16"),
            *("evaluation.every=0", "checkpoint.every=2", "monitoring.tensorboard=false"),
            *(f"run.directory={directory}", "run.name=run"),
        ]

    def start(self) -> subprocess.Popen:
        settings = {
            "VENV": str(Path(sys.executable).parents[1]),
            "RANKS": "2",
            "OMP_NUM_THREADS": "1",
            "DONE": str(self.done),
        }
        with self.errors.open("w") as errors:
            return subprocess.Popen(
                self._command, cwd=REPOSITORY, env=os.environ | settings, stderr=errors
            )

    def steps(self) -> list[int]:
        path = self.home / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def wait_until(self, condition: Callable[[], bool], running: subprocess.Popen) -> None:
        deadline = time.monotonic() + 180
        while not condition():
            assert running.poll() is None, self.errors.read_text()[-3000:]
            assert time.monotonic() < deadline, self.errors.read_text()[-3000:]
            time.sleep(0.05)


def test_run_completes_every_step_after_a_signal(tmp_path):
    launch = Launch(tmp_path)

    running = launch.start()
    launch.wait_until(lambda: 1 in launch.steps(), running)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) != 0  # not zero, so that a chain of stages does not continue
    assert "stopped by SIGTERM; the same command resumes" in launch.errors.read_text()
    stopped_after = json.loads((launch.home / "REQUEUE").read_text())["step"]
    assert launch.steps()[-1] == stopped_after < STEPS
    assert f"stopped by SIGTERM after step {stopped_after}; ch" in launch.errors.read_text()
    assert (launch.home / "checkpoints" / f"step_{stopped_after:06d}" / "state.json").is_file()

    assert not launch.done.exists()

    assert launch.start().wait(timeout=180) == 0, launch.errors.read_text()[-3000:]
    assert launch.steps() == list(range(1, STEPS + 1))
    assert launch.done.exists()
