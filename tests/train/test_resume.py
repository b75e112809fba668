"""A killed run resumes with identical metrics; on other layouts: test_layouts.py."""

import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from stable_opd_mcore.commands.train.train import train
from tests.parallel.launch import run_ranks, start_process
from tests.processes import wait_until_ended
from tests.train.runs import metrics_of, problems, tiny_config

pytestmark = pytest.mark.slow

CHECKPOINTS = {"every": 2, "keep": 2}
HELD_OUT = problems(64, 8)


def config_of(directory: Path, name: str, **sections):
    return tiny_config(
        directory,
        name,
        checkpoint=CHECKPOINTS,
        data=HELD_OUT,
        evaluation={"every": 3, "temperature": 1.0},
        **sections,
    )


def start(directory: Path) -> BaseProcess:
    return start_process(train, config_of(directory, "killed"), False)


def uninterrupted(rank: int, world_size: int, directory: str) -> None:
    train(config_of(Path(directory), "uninterrupted"), show_progress=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, uninterrupted, str(directory))
    return directory


def test_metrics_of_a_killed_and_restarted_run_are_identical(runs):
    metrics = runs / "killed" / "metrics.jsonl"
    for rows in (3, 7):  # row 0 is the evaluation before training
        process = start(runs)
        deadline = time.monotonic() + 240
        while process.is_alive() and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= rows:
                break
            time.sleep(0.01)
        assert process.is_alive(), "the run ended before it could be killed"
        helpers = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        process.join()
        wait_until_ended(*helpers)
    last = start(runs)
    last.join(240)
    assert last.exitcode == 0

    assert metrics_of(runs / "killed") == metrics_of(runs / "uninterrupted")
    kept = sorted(path.name for path in (runs / "killed" / "checkpoints").iterdir())
    assert kept == ["step_000008", "step_000010"]
