"""Runs with an environment: with each objective, on two ranks, with rollouts sampled ahead, killed,
evaluated, and stopped because the environment fails; and with agents.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stable_opd_mcore.commands.evaluate.evaluate import evaluate_config
from stable_opd_mcore.commands.evaluate.evaluated_model import evaluation_config
from stable_opd_mcore.commands.score.grading_files import FileGradingSettings, grade_files
from stable_opd_mcore.commands.score.grading_summary import table
from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.data.rollout_files import read_rollouts, write_rollouts
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_directory import RunDirectory
from tests.parallel.launch import run_ranks
from tests.rollout.test_both_engines import AGENTS
from tests.train.killed import run_killed_at
from tests.train.runs import (
    ALONE,
    metrics_of,
    problems,
    tiny_architecture,
    tiny_config,
)

pytestmark = pytest.mark.slow

STEPS, KILLED_AT = 5, 3
GAME = '''
def episode(row, seed):
    """Its first message stands for half of the prompts; one in four begins a context anew."""
    said, digit = (yield None if seed % 2 else f"{seed % 10}+1"), str(seed % 5)
    for number in range(3):
        if digit in said:
            return 1 - number / 4
        again = f"{digit}*{len(said) % 10}"
        if seed % 4 == 1 and number:
            again = {"restart": [{"role": "user", "content": again}]}
        said = yield again
    return 0

def broken(row, seed):
    said = yield "1+1"
    if seed % 8 > 2:
        raise KeyError("door")
    return 1
'''
LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
}
AHEAD = {"max_staleness": 2, "partial": True}
OBJECTIVES = {
    "lsm": {"name": "lsm", "top_k": 4},
    "gkd": {"name": "gkd"},
    "grpo": {"name": "grpo"},
}


def played(
    directory: str, name: str, function: str = "episode", rollout: Any = (), **sections: Any
) -> None:
    given = {
        "student": {"architecture": tiny_architecture(16, 2)},
        "teacher": {"architecture": tiny_architecture(32, 2)},
        "environment": {"function": f"{directory}/game.py:{function}", "max_turns": 3},
        "sampling": {"max_new_tokens": 6},
        "rollout": {"prompts_per_step": 6, "samples_per_prompt": 2, **dict(rollout)},
        "train": {"steps": STEPS, "micro_batch_tokens": 192},
        "data": problems(12, 4),
        "evaluation": {"every": 3, "temperature": 1.0},
    }
    config = tiny_config(Path(directory), name, **given | sections)
    train(config, show_progress=False)


def play_alone(rank: int, world_size: int, directory: str) -> None:
    played(directory, "alone")
    for name, objective in OBJECTIVES.items():
        given = {"objective": objective, "train": {"steps": 2}}
        played(directory, name, **given | (ALONE if name == "grpo" else {}))
    played(directory, "ahead", rollout=AHEAD)
    with pytest.raises(UserError, match=r"of 12 episodes .* KeyError: 'door'"):
        played(directory, "broken", "broken")


def play_in_layouts(rank: int, world_size: int, directory: str) -> None:
    for name, parallel in LAYOUTS.items():
        given: dict[str, Any] = {"train": {"steps": 2, "micro_batch_tokens": 192}}
        given["evaluation"] = {"every": 0}
        played(directory, name, parallel=parallel, **given)


def play_with_checkpoints(rank: int, world_size: int, directory: str, name: str) -> None:
    played(directory, name, checkpoint={"every": 2, "keep": 5}, rollout=AHEAD)


def play_agents(rank: int, world_size: int, directory: str) -> None:
    """The example of docs/agents.md, and an agent that forks, whose rollouts are replayed: as they
    are, and with each turn in a context of its own."""
    for name, function in (("page", "page.py:episode"), ("tree", "tree.py:tree")):
        section = {"function": f"{directory}/{function}", "workers": 2, "timeout_seconds": 200}
        given = {"environment": section, "train": {"steps": 1}, "evaluation": {"every": 0}}
        played(directory, name, **given)
    evaluate_config(evaluation_config(Path(directory) / "page"), lambda _: None)
    store_turn_by_turn(Path(directory) / "tree", Path(directory) / "split")
    for name in ("tree", "split"):
        stored = {"engine": "replay", "replay_from": f"{directory}/{name}"}
        played(directory, f"replay_{name}", rollout=stored, **given)


def store_turn_by_turn(run: Path, other: Path) -> None:
    """Store the rollouts of the first step again, each turn in a context of its own."""
    split = []
    for rollout in read_rollouts(RunDirectory(run).rollouts(1)):
        turns, start, context = [], 0, list(rollout.prompt.token_ids)
        for turn in rollout.turns:
            context = [*([] if turn.restarts else context), *turn.before]
            turns.append(replace(turn, before=tuple(context), restarts=True))
            context += rollout.token_ids[start : start + turn.num_tokens].tolist()
            start += turn.num_tokens
        split.append(replace(rollout, turns=tuple(turns)))
    write_rollouts(RunDirectory(other).rollouts(1), split)


def test_agents_train_and_each_token_counts_once_whatever_its_context(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (block,) = re.findall(r"^```python\n(# envs/sums.py.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(block)
    (tmp_path / "tree.py").write_text(AGENTS)
    run_ranks(1, play_agents, str(tmp_path))
    for row in metrics_of(tmp_path / "page"):
        assert row["logprob/rollout_gap_max"] < 1e-5
        assert 1 <= row["rollout/turns_mean"] <= 2
        assert row["environment/continued"] + row["environment/begun"] > 12
        assert row["environment/rewritten"] == 0
        assert row["environment/trained_share"] == 1
    (results,) = (tmp_path / "page").glob("evaluation/*/results.json")
    accuracy = json.loads(results.read_text())["benchmarks"]["held_out"]["accuracy"]
    scored = grade_files(
        [*results.parent.glob("responses/held_out/part_*")],
        tmp_path / "page.score",
        FileGradingSettings(),
    )
    assert scored["all"]["numbers"]["accuracy"] == pytest.approx(accuracy)
    assert "4 of 4 rows are episodes" in table(scored)
    rollouts = read_rollouts(RunDirectory(tmp_path / "tree").rollouts(1))
    assert sum(turn.restarts for one in rollouts for turn in one.turns[1:]) > len(rollouts)
    whole, split = (metrics_of(tmp_path / f"replay_{name}")[0] for name in ("tree", "split"))
    for key in ("loss/pg", "loss/kl", "loss/sft", "grad_norm", "rollout/accuracy"):
        assert split[key] == pytest.approx(whole[key], rel=1e-5), key
    assert whole["logprob/rollout_gap_max"] < 1e-5
    models = [
        load_file(tmp_path / f"replay_{n}/model/model.safetensors") for n in ("tree", "split")
    ]
    for name, weight in models[0].items():
        assert (weight - models[1][name]).abs().max() < 1e-5, name


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("games")
    (directory / "game.py").write_text(GAME)
    run_ranks(1, play_alone, str(directory))
    return directory


def test_the_student_is_trained_on_what_it_sampled_in_each_turn(games):
    """The engine's log-probability of every token is the trainer's, over turns and contexts."""
    rollouts = [
        rollout
        for step in range(1, STEPS + 1)
        for rollout in read_rollouts(RunDirectory(games / "alone").rollouts(step))
    ]
    turns = [rollout.turns for rollout in rollouts]
    assert {len(each) for each in turns} == {1, 2, 3}
    assert {each[0].restarts for each in turns} == {False, True}
    assert any(turn.restarts for each in turns for turn in each[1:])
    assert {rollout.reward for rollout in rollouts} >= {0, 1}
    assert all(rollout.reward is not None for rollout in rollouts)
    rows = metrics_of(games / "alone")[1:]
    assert all(row["logprob/rollout_gap_max"] < 1e-5 for row in rows)
    first, second = turns[:12], turns[12:24]
    assert rows[0]["rollout/turns_mean"] == sum(map(len, first)) / 12
    assert rows[0]["kl/teacher_turn_3_4"] is not None
    assert 1 < rows[2]["eval/turns_max"] <= 3
    # No evaluation comes before the second step.
    assert rows[1]["environment/answers"] == sum(len(each) + 1 for each in second)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_on_episodes(games, name):
    rows = [row for row in metrics_of(games / name) if row["step"]]
    assert len(rows) == 2
    assert all(row["grad_norm"] > 0 for row in rows)


def test_evaluations_play_episodes_in_the_same_worlds(games):
    """At step 0 all runs that begin with the same weights have the same held-out accuracy."""
    first = [metrics_of(games / name)[0] for name in ("alone", "ahead", "lsm", "grpo")]
    assert len({json.dumps(row["eval/accuracy"]) for row in first}) == 1
    assert first[0]["eval/accuracy"] is not None


def evaluate_alone(rank: int, world_size: int, directory: str) -> None:
    evaluate_config(evaluation_config(Path(directory) / "alone"), lambda line: None)


def test_a_trained_run_is_evaluated_in_the_environment(games):
    run_ranks(1, evaluate_alone, str(games))
    (file,) = (games / "alone").glob("evaluation/*/results.json")
    result = json.loads(file.read_text())["benchmarks"]["held_out"]
    assert result["num_problems"] == 4
    assert result["turns_max"] > 1
    rollouts = [
        rollout
        for part in file.parent.glob("responses/held_out/part_*")
        for rollout in read_rollouts(part)
    ]
    assert result["turns_mean"] == sum(len(rollout.turns) for rollout in rollouts) / len(rollouts)
    assert result["num_correct"] == [rollout.reward == 1 for rollout in rollouts]
    identity = json.loads((file.parent / "responses/held_out/identity.json").read_text())
    assert identity["environment"]["max_turns"] == 3


def test_layouts_agree(games):
    run_ranks(2, play_in_layouts, str(games))
    expected = metrics_of(games / "alone")[1:3]
    for name in LAYOUTS:
        for ours, theirs in zip(expected, metrics_of(games / name), strict=True):
            for key in ("loss/pg", "loss/kl", "loss/sft", "grad_norm", "rollout/accuracy"):
                assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-6), (name, key)
            assert theirs["logprob/rollout_gap_max"] < 1e-5, name


def test_a_killed_run_plays_again_what_was_sampled_ahead(games):
    """It has the same prompts and worlds; what was sampled ahead, it samples with newer weights."""
    run_ranks(1, play_with_checkpoints, str(games), "whole")
    run_killed_at(KILLED_AT, play_with_checkpoints, str(games), "killed")
    run_ranks(1, play_with_checkpoints, str(games), "killed")
    whole, killed = (metrics_of(games / name) for name in ("whole", "killed"))
    assert [row["step"] for row in killed] == [row["step"] for row in whole]
    assert killed[:3] == whole[:3]
    for step in range(1, STEPS + 1):
        both = [
            read_rollouts(RunDirectory(games / name).rollouts(step)) for name in ("whole", "killed")
        ]
        assert [r.prompt.prompt_id for r in both[0]] == [r.prompt.prompt_id for r in both[1]]
        assert [r.turns[0].before for r in both[0]] == [r.turns[0].before for r in both[1]]
