"""A run with the user's own code: what it trains on, and the refusal of changed code."""

from pathlib import Path

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.run_directory import RunDirectory
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, problems, tiny_config

OWN = """
NEEDS = ("given_advantage",)
def objective(rows, settings):
    return -rows.given_advantage * (rows.logprob - rows.old_logprob).exp()
def reward(row, response):
    if len(response) == 5:
        raise ValueError(response)
    return min(1, len(response) / 100) if row["answer"] else None
"""


def own_run(rank: int, world_size: int, directory: str) -> None:
    home = Path(directory)
    own = home / "own.py"
    if rank == 0:
        own.write_text(OWN)
    settings = {
        "objective": {"name": f"{own}:objective"},
        "reward": {"function": f"{own}:reward"},
        "data": problems(64, 16),
        "evaluation": {"every": 2},
        "checkpoint": {"every": 1},
        "train": {"steps": 2},
    }
    train(tiny_config(home, "run", **settings), show_progress=False)
    own.write_text(OWN + "\n")
    settings["train"] = {"steps": 3}
    changed = r"contents of objective.name=.*own.py: \d+ bytes, .*\n  contents of reward.function="
    with pytest.raises(ConfigError, match=changed):
        train(tiny_config(home, "run", **settings), show_progress=False)
    kept = home / "run/own_code"
    assert [(kept / f"{key}.py").read_text() for key in ("objective.name", "reward.function")] == [
        OWN,
        OWN,
    ]
    train(tiny_config(home, "run", **settings), show_progress=False, accept_changes=True)
    assert (kept / "reward.function.py").read_text() == OWN + "\n"


def test_reward_and_objective_of_the_user_s_are_trained_on(tmp_path):
    run_ranks(1, own_run, str(tmp_path))
    rollouts = read_rollouts(RunDirectory(tmp_path / "run").rollouts(1))
    lengths = [len(rollout.text) for rollout in rollouts]
    expected = [0 if length == 5 else min(1, length / 100) for length in lengths]
    assert [rollout.reward for rollout in rollouts] == pytest.approx(expected)
    rows = metrics_of(tmp_path / "run")
    assert rows[1]["rollout/accuracy"] == pytest.approx(sum(expected) / len(expected))
    assert rows[1]["rollout/grading_crashes"] == lengths.count(5)
    assert rows[1]["grad_norm"] > 0
    assert 0 < rows[0]["eval/accuracy"] < 0.5
