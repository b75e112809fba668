"""A user's mistake ends `stable-opd train` with one message, exit code 2 and no run files."""

import json
import shutil
from pathlib import Path

import pytest

from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.train.loop import train
from tests.command import exit_code
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_architecture, tiny_config

ROWS = [{"problem": "1+1", "answer": "2", "solution": "1+1=2;[2]"}] * 2


def trained(rank: int, world_size: int, directory: str) -> None:
    train(tiny_config(Path(directory), "trained", train={"steps": 2}), show_progress=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, trained, str(directory))
    return directory / "trained"


def refusal_message(capsys, monkeypatch, tmp_path, **sections) -> str:
    """Run `stable-opd train` with a bad setting and return its message; it must write no run."""
    save_config(tiny_config(tmp_path / "runs", "bad", **sections), tmp_path / "bad.yaml")
    assert exit_code(monkeypatch, "train", tmp_path / "bad.yaml") == 2
    assert not (tmp_path / "runs" / "bad" / "metrics.jsonl").exists()
    assert not (tmp_path / "runs" / "bad" / "model").exists()
    return capsys.readouterr().err


def data(path: Path, lines: list[str]) -> dict:
    path.write_text("\n".join(lines) + "\n")
    return {"train": {"path": str(path)}}


def test_bad_rows_are_refused(capsys, monkeypatch, tmp_path):
    lines = [json.dumps(ROWS[0]), '{"problem": "1+1",']
    rows = data(tmp_path / "rows.jsonl", lines)
    message = refusal_message(capsys, monkeypatch, tmp_path, data=rows)
    assert "rows.jsonl" in message
    assert "2" in message


def test_settings_that_do_not_fit_are_refused(capsys, monkeypatch, tmp_path):
    rows, absent = tmp_path / "rows.jsonl", str(tmp_path / "absent.jsonl")
    too_few = data(rows, [json.dumps(ROWS[0])] * 7)
    for sections, words in (
        ({"data": too_few}, ["rollout.prompts_per_step=8 exceeds the 7 usable rows"]),
        ({"data": {"train": {"path": absent}}}, [absent]),
        ({"parallel": {"tensor": 2}}, ["parallel.tensor=2", "1 started rank"]),
    ):
        message = refusal_message(capsys, monkeypatch, tmp_path, **sections)
        assert all(word in message for word in words), message


def test_unwritable_run_directory_is_named_with_the_remedy(capsys, monkeypatch, tmp_path):
    (tmp_path / "runs").write_text("")
    message = refusal_message(capsys, monkeypatch, tmp_path)
    assert f"{tmp_path / 'runs' / 'bad'}: cannot be written: [Errno 20] Not a directory" in message
    assert "set run.directory to a directory that this user may write" in message


def test_checkpoint_of_another_architecture_is_refused(capsys, monkeypatch, tmp_path, run):
    target = tmp_path / "runs" / "bad" / "checkpoints" / "step_000002"
    shutil.copytree(run / "checkpoints" / "step_000002", target)
    other = {"architecture": tiny_architecture(64, 4)}
    message = refusal_message(capsys, monkeypatch, tmp_path, student=other)
    assert "another architecture" in message
    assert "hidden_size=32 (the config's model has 64)" in message
