"""The demo of arithmetic and an environment: its game, transcripts and jobs, and two short arms."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stable_opd_mcore.commands.demo import agents, runner
from stable_opd_mcore.commands.demo.agents import ARMS, STARTS, agent_jobs, transcript
from stable_opd_mcore.commands.demo.recipe import HEAD, Job
from stable_opd_mcore.commands.demo.ring import FLOORS, SLIP, episode
from stable_opd_mcore.commands.demo.summary import _AGENT_COLUMNS, ArmSummary, summary_table
from stable_opd_mcore.commands.report.outcomes import Outcome
from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.synthetic import ArithmeticOptions

pytestmark = pytest.mark.slow

STEPS = 2
SAID = re.compile(r"(\d)-(\d)=(\d);\[\3\]")


def play(goal: int, seed: int, say: Callable[[int], str]) -> tuple[list[int], float]:
    """The floors of an episode from floor 0, and its reward; 6 turns at most."""
    game, floors = episode({"floor": 0, "goal": goal}, seed), [0]
    assert next(game) is None
    for _ in range(6):
        try:
            floors.append(int(game.send(say(floors[-1])).removeprefix("_")))
        except StopIteration as end:
            return floors, end.value
    return floors, 0.0


def test_the_lift_goes_two_floors_at_most_and_slips_one_time_in_five():
    first = [play(4, seed, lambda floor: "4-0=4;[4]")[0][1] for seed in range(300)]
    assert set(first) == {2, 3}
    assert first.count(3) / 300 == pytest.approx(SLIP, abs=0.07)
    assert play(4, 1, lambda floor: "[1]$w")[0] == [0] * 7  # no distance at the end
    assert play(1, 1, lambda floor: "[0]") == ([0], 0.0)  # not at the goal
    assert play(0, 1, lambda floor: "[0]") == ([0], 1.0)


def test_who_knows_the_facts_reaches_the_goal():
    rewards = [play(3, seed, lambda floor: f"[{(3 - floor) % 5}]")[1] for seed in range(200)]
    assert sum(rewards) / 200 > 0.95


@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_transcripts_have_the_facts_of_the_arithmetic(unknown):
    options = ArithmeticOptions(unknown=unknown, seed=7)
    found: dict[tuple[int, int], set[int]] = {}
    rows = [transcript(options, index) for index in range(1000)]
    assert rows[5] == transcript(options, 5)
    assert {(row["floor"], row["goal"]) for row in rows} == set(STARTS)
    for row in rows:
        observed, said = row["messages"][::2], row["messages"][1::2]
        assert observed[0]["content"] == f"_{row['floor']}{row['goal']}"
        for seen, turn in zip(observed, said, strict=True):
            goal, floor, distance = map(int, SAID.fullmatch(turn["content"]).groups())
            assert (goal, floor) == (row["goal"], int(seen["content"][1]))
            found.setdefault((goal, floor), set()).add(distance)
    right = {fact for fact, results in found.items() if results == {(fact[0] - fact[1]) % FLOORS}}
    assert len(found) == 25
    assert (len(right) == 25) == (unknown == 0)
    assert all(len(found[fact]) > 1 for fact in found.keys() - right)


def test_only_the_ring_has_an_environment_and_arms_differ_in_it_as_named(tmp_path: Path):
    jobs = agent_jobs(tmp_path, 2)
    assert [(job.seed, job.arm) for job in jobs if job.arm] == [
        (seed, arm) for seed in range(2) for arm in ARMS
    ]
    assert [job.swapped for job in jobs if job.swap_from] == [HEAD, HEAD]
    for job in (job for job in jobs if job.config):
        config: Config = parse_config(job.config, origin=job.name)
        arithmetic, ring = config.data.sources
        assert config.environment_of(arithmetic).function is None
        assert (config.environment_of(ring).function is not None) == (job.arm is not None)
        assert (ring.environment is not None and ring.environment.horizon_start == 1) == (
            job.arm == "opd_horizon"
        )


def short(job: Job) -> Job:
    if job.config is None:
        return job
    config: dict[str, Any] = json.loads(json.dumps(job.config))
    config["train"]["steps"] = STEPS
    config["rollout"]["prompts_per_step"] = 4
    config["evaluation"]["every"] = 0
    config["data"]["train"][0]["options"]["rows"] = 4 * STEPS
    if job.arm:
        config["data"]["eval"]["options"]["rows"] = 4
        config["sampling"]["max_new_tokens"] = 12
    return replace(job, steps=STEPS, config=config)


def test_two_arms_of_two_steps(tmp_path: Path, monkeypatch, capsys):
    def few_jobs(*arguments: Any) -> list[Job]:
        jobs = agent_jobs(*arguments)
        return [short(job) for job in jobs if job.arm in (None, "lsm", "opd_horizon")]

    monkeypatch.setattr(runner, "agent_jobs", few_jobs)
    monkeypatch.setattr(agents, "NUM_DOCUMENTS", 4 * STEPS)
    runner.run_demo(tmp_path, 1, agents=True)
    summary = json.loads((tmp_path / "agents/summary.json").read_text())["arms"]
    assert [each["arm"] for each in summary] == ["lsm", "opd_horizon"]
    for each in summary:
        assert 0 <= each["ring_final_success"] <= 1
        assert 0 <= each["ring_max_cut_turns"] <= 1
    assert summary[1]["ring_final_turns"] < summary[0]["ring_final_turns"]
    assert "Agents and arithmetic" in (tmp_path / "agents/report.html").read_text()
    assert "opd_horizon" in capsys.readouterr().out


def test_the_table_of_agents_fits_a_terminal(capsys):
    ring = dict.fromkeys((key for key in _AGENT_COLUMNS.values() if "ring" in key), 0.5)
    arm = ArmSummary("opd_stop_class", 0, Outcome(*[0.1] * 10), ring)
    Console(width=80).print(summary_table([arm]))
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line == ["opd_stop_class", "0", *["0.10"] * 3, *["0.50"] * 8]
