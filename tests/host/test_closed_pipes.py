"""A run goes on when nobody reads its output any more."""

import os
import subprocess
import sys

from stable_opd_mcore.config.load import save_config
from tests.train.runs import tiny_config


def test_a_run_outlives_the_reader_of_its_output(tmp_path):
    """`stable-opd train CONFIG 2>&1 | head -1`."""
    save_config(tiny_config(tmp_path, "run", train={"steps": 2}), tmp_path / "run.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "stable_opd_mcore", "train", str(tmp_path / "run.yaml")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "FORCE_COLOR": "1"},  # a bar that moves
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=240) == 0
    for name in ("metrics.jsonl", "summary.json", "report.html", "model/tokenizer.json", "DONE"):
        assert (tmp_path / "run" / name).is_file(), name
