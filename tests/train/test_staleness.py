"""Runs whose rollouts are sampled ahead: the bound on their age, and their resume.

The embedded engine samples them, so every run is the same each time.
"""

import json
import shutil
from pathlib import Path

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.host.run_directory import RunDirectory
from tests.parallel.launch import run_ranks
from tests.train.killed import run_killed_at
from tests.train.runs import metrics_of, problems, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

STEPS = 8
KILLED_AT = 5  # its row is written, and its checkpoint is not
SCHEDULES = [(0, False), (1, True), (3, False), (3, True)]  # max_staleness, partial
HELD_OUT = problems(7, 4)  # epochs end inside steps


def config_of(directory: Path, name: str, max_staleness: int, partial: bool, **sections):
    sections = {"sampling": {"max_new_tokens": 8}, "checkpoint": {"every": 0}, **sections}
    return tiny_config(
        directory,
        name,
        student={"architecture": tiny_architecture(16, 2)},
        teacher={"architecture": tiny_architecture(16, 2)},
        rollout={
            "prompts_per_step": 3,
            "samples_per_prompt": 2,
            "max_staleness": max_staleness,
            "partial": partial,
        },
        data=HELD_OUT,
        evaluation={"every": 3, "temperature": 1.0},
        train={"steps": STEPS},
        **sections,
    )


def name_of(schedule: tuple[int, bool]) -> str:
    return "{}_{}".format(*schedule)


def run_schedules(rank: int, world_size: int, directory: str) -> None:
    for schedule in SCHEDULES:
        train(config_of(Path(directory), name_of(schedule), *schedule), show_progress=False)
    horizon = {"max_new_tokens": 8, "horizon_start": 2, "horizon_steps": 6}
    config = config_of(Path(directory), "horizon", 2, True, sampling=horizon)
    train(config, show_progress=False)


def run_with_checkpoints(rank: int, world_size: int, directory: str, name: str) -> None:
    checkpoint = {"every": 2, "keep": 5}
    train(config_of(Path(directory), name, 2, True, checkpoint=checkpoint), show_progress=False)


@pytest.fixture(scope="module")
def schedules(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("schedules")
    run_ranks(1, run_schedules, str(directory))
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """`whole`, and `killed` after a checkpoint of step 4 with rollouts sampled ahead."""
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, run_with_checkpoints, str(directory), "whole")
    run_killed_at(KILLED_AT, run_with_checkpoints, str(directory), "killed")
    shutil.copytree(directory / "killed", directory / "on_two_ranks")
    return directory


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_tokens_are_as_old_as_the_bound_says(schedules, schedule):
    max_staleness, partial = schedule
    run = schedules / name_of(schedule)
    for trained in range(STEPS):  # the version that step `trained` + 1 updates
        rollouts = read_rollouts(RunDirectory(run).rollouts(trained + 1))
        assert len(rollouts) == 6
        for rollout in rollouts:
            versions = [segment.weight_version for segment in rollout.segments]
            assert versions[0] == rollout.weight_version == max(0, trained - max_staleness)
            assert versions == list(range(versions[0], versions[0] + len(versions)))
            assert versions[-1] <= trained
            assert rollout.finish_reason in ("stop", "length")
            if rollout.finish_reason == "length":
                assert len(rollout.token_ids) == 8
                assert len(versions) == (min(max_staleness, trained) + 1 if partial else 1)
    rows = metrics_of(run)
    evaluated = [row["step"] for row in rows if row.get("eval/accuracy") is not None]
    assert evaluated == [0, 3, 6, STEPS]
    if max_staleness:
        key = f"perf/staleness_{max_staleness}"
        assert [row[key] for row in rows if row["step"] > max_staleness] == [1] * (
            STEPS - max_staleness
        )


def test_a_step_has_the_prompts_of_the_data_order_however_early_they_are_sampled(schedules):
    for step in range(1, STEPS + 1):
        steps = [
            read_rollouts(RunDirectory(schedules / name_of(s)).rollouts(step)) for s in SCHEDULES
        ]
        assert len({tuple(r.prompt.prompt_id for r in rollouts) for rollouts in steps}) == 1


def test_evaluations_do_not_touch_what_is_sampled_ahead(schedules):
    """At step 0 all schedules have the same weights."""
    assert len({json.dumps(metrics_of(schedules / name_of(s))[0]) for s in SCHEDULES}) == 1


def test_a_growing_length_budget_holds_for_each_step(schedules):
    for step, budget in enumerate((2, 3, 4, 5, 6, 7, 8, 8), start=1):
        rollouts = read_rollouts(RunDirectory(schedules / "horizon").rollouts(step))
        lengths = {r.finish_reason: len(r.token_ids) for r in rollouts}
        assert lengths["length"] == budget
        assert max(len(rollout.token_ids) for rollout in rollouts) == budget


def test_a_killed_run_samples_again_what_was_sampled_ahead(runs):
    """With its checkpoint's weights, on one rank or two. Rollouts that the release before stored
    with the checkpoint are not read."""
    stored = runs / "killed/in_flight/step_000004/step_000004.jsonl"
    stored.parent.mkdir(parents=True)
    stored.write_text("not read")
    run_ranks(1, run_with_checkpoints, str(runs), "killed")
    run_ranks(2, run_with_checkpoints, str(runs), "on_two_ranks")
    killed, whole, on_two_ranks = (
        [read_rollouts(RunDirectory(runs / name).rollouts(step)) for step in range(1, STEPS + 1)]
        for name in ("killed", "whole", "on_two_ranks")
    )
    assert killed[:4] == whole[:4]
    versions = [{rollout.weight_version for rollout in step} for step in killed[4:]]
    assert versions == [{4}, {4}, {4}, {5}]
    for ours, theirs, others in zip(killed, whole, on_two_ranks, strict=True):
        assert [r.prompt for r in ours] == [r.prompt for r in theirs]
        assert [r.token_ids.tolist() for r in ours] == [r.token_ids.tolist() for r in others]
    ours, theirs = (
        [row["loss/total"] for row in metrics_of(runs / name)[1:]]
        for name in ("killed", "on_two_ranks")
    )
    assert ours == pytest.approx(theirs, rel=1e-4)
