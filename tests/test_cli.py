"""The command as a process among others."""

import os
import subprocess
import sys

import pytest

from stable_opd_mcore.cli import main
from stable_opd_mcore.config.load import save_config
from tests.monitoring.make_run import make_run
from tests.train.runs import tiny_config


@pytest.mark.parametrize("output", ["", "run/metrics.jsonl/report.html"])
def test_a_path_that_cannot_be_written_ends_with_one_line(tmp_path, monkeypatch, capsys, output):
    run = make_run(tmp_path / "run", 2)
    arguments = ["stable-opd", "report", str(run), "--output", str(tmp_path / output)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {tmp_path}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


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
