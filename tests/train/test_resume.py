"""A killed run resumes with identical metrics. Each source has an objective of its own, two
teachers take turns, their prompts are made of rollouts, and rollouts begin with golden turns. On
other layouts: test_layouts.py.
"""

import json
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from stable_opd_mcore.commands.train.train import train
from tests.parallel.launch import run_ranks, start_process
from tests.processes import wait_until_ended
from tests.train.runs import (
    OBJECTIVES,
    metrics_of,
    objective_of_each_source,
    problems,
    tiny_architecture,
    tiny_config,
)
from tests.train.test_golden_turns import turns_of

pytestmark = pytest.mark.slow

CHECKPOINTS = {"every": 2, "keep": 2}


def config_of(directory: Path, name: str):
    sections, talks = objective_of_each_source(), directory / "talks.jsonl"
    sections["teacher"]["models"] = {"other": {"architecture": tiny_architecture(24, 3)}}
    sections["data"]["train"][[*OBJECTIVES].index("taught")]["teacher"] = "other"
    rows = [json.dumps({"messages": turns_of(number)}) + "\n" for number in range(1, 5)]
    talks.write_text("".join(rows))
    columns = {"messages": "messages", "golden": "all", "answer": None}
    talk = {"path": str(talks), "columns": columns, "objective": {"name": "opd"}}
    sections["data"] = {
        "train": [*sections["data"]["train"], talk],
        "eval": problems(64, 8)["eval"],
    }
    begun = {"prefix": {"by": "golden", "decay_steps": 8}, "samples_per_prompt": 2}
    sections["rollout"] |= begun
    return tiny_config(
        directory,
        name,
        checkpoint=CHECKPOINTS,
        train={"steps": 10},
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
    for rows in (3, 6):  # row 0 is the evaluation before training
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

    found, expected = metrics_of(runs / "killed"), metrics_of(runs / "uninterrupted")
    assert found == expected
    for key in ("rollout/prefix_share", "teacher_prompt/given_share"):
        assert any(0 < (row.get(key) or 0) < 1 for row in found), key
    kept = sorted(path.name for path in (runs / "killed" / "checkpoints").iterdir())
    assert kept == ["step_000008", "step_000010"]
