"""The GPU suite as a whole on a CPU, at a tiny size: every part but the two slowest runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.suite import PARTS

BY_HAND = ("resume", "servers")  # what they call is tested in tests/train and next to this file
ROOT = Path(__file__).parents[2]


@pytest.mark.cluster
def test_every_part_runs_on_a_cpu(tmp_path):
    names = [part.name for part in PARTS if part.name not in BY_HAND]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", f"--out={tmp_path}"]
    finished = subprocess.run(
        [*command, "--parts", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout
    results = json.loads((tmp_path / "results.json").read_text())["parts"]
    needs_gpu = {"attention": "skipped"}
    expected = dict.fromkeys(names, "ok") | needs_gpu
    assert {part["name"]: part["status"] for part in results} == expected
    assert all(part["entries"] for part in results if part["name"] not in needs_gpu)
