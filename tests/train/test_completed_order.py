"""Runs whose steps train on the prompts that finish first (rollout.order=completed).

The embedded engine draws them in pieces, so the same prompts finish early in every run.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from stable_opd_mcore.data.prompts import PromptOrder
from stable_opd_mcore.data.rollout_files import read_rollouts, rollout_path
from stable_opd_mcore.train import loop
from tests.parallel.launch import run_ranks
from tests.train.runs import end_process_at, metrics_of, tiny_architecture, tiny_config
from tests.train.test_staleness import in_flight

pytestmark = pytest.mark.slow

STEPS, PROMPTS, ROWS = 8, 4, 9  # epochs end inside steps, and a row may come twice in a step
KILLED_AT = 5  # its row is written, and its checkpoint is not
SCHEDULES = [(2, True), (3, True), (3, False)]  # max_staleness, partial


def config_of(directory: Path, name: str, max_staleness: int, partial: bool, **sections: Any):
    model = {"architecture": tiny_architecture(16, 2)}
    rollout = {
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": 2,
        "max_staleness": max_staleness,
        "partial": partial,
        "order": "completed",
        **sections.pop("rollout", {}),
    }
    return tiny_config(
        directory,
        name,
        student=model,
        teacher=model,
        rollout=rollout,
        sampling={"max_new_tokens": 40},
        data={"train": {"path": "synthetic:arithmetic", "options": {"rows": ROWS}}},
        train={"steps": STEPS},
        **sections,
    )


def note_states(run: Path) -> None:
    """Let each step write the state after it."""
    train_step = loop.train_step

    def noted(*args: Any) -> Any:
        result = train_step(*args)
        if dist.get_rank() == 0:
            kept = {key: getattr(result.state, key) for key in ("cursor", "late", "early")}
            run.mkdir(parents=True, exist_ok=True)
            (run / f"state_{result.state.step}.json").write_text(json.dumps(kept))
        return result

    loop.train_step = noted


def run_schedules(rank: int, world_size: int, directory: str) -> None:
    train_step = loop.train_step
    for schedule in SCHEDULES:
        config = config_of(Path(directory), name_of(schedule), *schedule)
        loop.train_step = train_step
        note_states(config.run.path)
        loop.train(config, show_progress=False)


def resume(rank: int, world_size: int, directory: str, name: str, **parallel: int) -> None:
    checkpoint = {"every": 4, "asynchronous": False}  # complete before the kill
    config = config_of(Path(directory), name, 3, True, checkpoint=checkpoint, parallel=parallel)
    note_states(config.run.path)
    loop.train(config, show_progress=False)


def run_and_die(rank: int, world_size: int, directory: str) -> None:
    end_process_at(KILLED_AT)
    resume(rank, world_size, directory, "killed")


def resume_with_tensor_ranks(rank: int, world_size: int, directory: str, name: str) -> None:
    resume(rank, world_size, directory, name, tensor=world_size)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """One run for each schedule, and `killed`, of (3, True), after its checkpoint of step 4."""
    directory = tmp_path_factory.mktemp("completed")
    run_ranks(1, run_schedules, str(directory))
    with pytest.raises(ProcessExitedException):
        run_ranks(1, run_and_die, str(directory))
    for name in ("data_ranks", "tensor_ranks"):
        shutil.copytree(directory / "killed", directory / name)
    return directory


def name_of(schedule: tuple[int, bool]) -> str:
    return "{}_{}".format(*schedule)


def state_of(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / f"state_{step}.json").read_text())


def draws_of(run: Path) -> list[list[int]]:
    """The draws on which each step trained."""
    trained: set[int] = set()
    steps = []
    for step in range(1, STEPS + 1):
        state = state_of(run, step)
        so_far = {*range(state["cursor"]), *state["early"]}.difference(state["late"])
        steps.append(sorted(so_far - trained))
        assert trained < so_far
        trained = so_far
    return steps


def prompts_of(run: Path, step: int) -> list[str]:
    return [r.prompt.prompt_id for r in read_rollouts(rollout_path(run, step))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_prompt_is_trained_on_once_and_within_the_bound(runs, schedule):
    max_staleness, partial = schedule
    run, order = runs / name_of(schedule), PromptOrder(ROWS, 0, PROMPTS)
    rows = metrics_of(run)
    exchanged, ages, twice = 0, Counter[int](), 0
    for step, draws in enumerate(draws_of(run)):
        own = range(PROMPTS * step, PROMPTS * (step + 1))
        assert len(draws) == PROMPTS
        assert min(draws) >= own.start - PROMPTS
        assert max(draws) < own.stop + (max_staleness - 1) * PROMPTS
        ids = [order.indices(draw, 1)[0] for draw in draws for _ in range(2)]
        names = prompts_of(run, step + 1)
        assert [int(name.rpartition(":")[2]) for name in names] == ids
        twice += len(set(ids)) < PROMPTS
        rollouts = read_rollouts(rollout_path(run, step + 1))
        for place, rollout in enumerate(rollouts):
            versions = [segment.weight_version for segment in rollout.segments]
            first = max(0, draws[place // 2] // PROMPTS + 1 - max_staleness)
            assert rollout.weight_version == versions[0] == first
            assert versions == list(range(first, first + len(versions)))
            assert versions[-1] <= step
            ages[step - first] += 1
            assert rollout.finish_reason in ("stop", "length")
        early = [len(r.token_ids) for i, r in enumerate(rollouts) if draws[i // 2] >= own.stop]
        assert rows[step]["rollout/early_groups"] == len(early) / 2
        mean = rows[step]["rollout/response_length_mean_early"]
        assert mean == (pytest.approx(sum(early) / len(early)) if early else None)
        exchanged += len(early) // 2
    assert sorted(draw for draws in draws_of(run) for draw in draws) == [*range(STEPS * PROMPTS)]
    # Without `partial` the embedded engine draws to the end at once, so nothing is exchanged.
    assert max(ages) == (max_staleness if partial else max_staleness - 1)
    assert (exchanged > 0) == partial


def test_a_killed_run_repeats_its_metrics_and_loses_no_token(runs):
    assert state_of(runs / "killed", 4)["late"]
    held = in_flight(runs / "killed", 4)
    run_ranks(1, resume, str(runs), "killed")
    assert metrics_of(runs / "killed") == metrics_of(runs / "3_True")
    for step in range(1, STEPS + 1):
        ours, theirs = (rollout_path(runs / name, step) for name in ("killed", "3_True"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert draws_of(runs / "killed") == draws_of(runs / "3_True")
    assert min(held) == 3


@pytest.mark.parametrize(
    ("name", "go_on"), [("data_ranks", resume), ("tensor_ranks", resume_with_tensor_ranks)]
)
def test_another_layout_goes_on_with_the_same_prompts(runs, name, go_on):
    run_ranks(2, go_on, str(runs), name)
    assert draws_of(runs / name) == draws_of(runs / "3_True")
    for step in range(1, STEPS + 1):
        ours, theirs = (
            sorted(
                (r.prompt.prompt_id, r.sample_index, r.token_ids.tolist())
                for r in read_rollouts(rollout_path(runs / run, step))
            )
            for run in (name, "3_True")
        )
        assert ours == theirs
    ours, theirs = (
        [row["loss/total"] for row in metrics_of(runs / run)] for run in (name, "3_True")
    )
    assert ours == pytest.approx(theirs, rel=1e-4)
