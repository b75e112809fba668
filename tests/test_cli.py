"""The command: what it prints and how it exits."""

import os
import subprocess
import sys

import pytest

from stable_opd_mcore.cli import main
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.errors import ConfigError
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


def raising(error):
    def train(*_args, **_settings):
        raise error

    return train


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    save_config(tiny_config(tmp_path, "run"), tmp_path / "run.yaml")
    monkeypatch.setattr("sys.argv", ["stable-opd", "train", str(tmp_path / "run.yaml")])


@pytest.mark.usefixtures("arguments")
def test_a_user_error_is_one_message_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr("stable_opd_mcore.train.loop.train", raising(ConfigError("mend a=1")))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "error: mend a=1\n")


@pytest.mark.usefixtures("arguments")
@pytest.mark.parametrize("error", [ValueError("of torch"), OSError("of a socket")])
def test_any_other_error_keeps_its_traceback(monkeypatch, error):
    monkeypatch.setattr("stable_opd_mcore.train.loop.train", raising(error))
    with pytest.raises(type(error), match=str(error)):
        main()


@pytest.mark.usefixtures("arguments")
def test_a_second_ctrl_c_exits_with_130(monkeypatch, capsys):
    monkeypatch.setattr("stable_opd_mcore.train.loop.train", raising(KeyboardInterrupt()))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "nothing was saved since the newest checkpoint" in capsys.readouterr().err
