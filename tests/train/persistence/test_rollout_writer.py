"""One file from the rollouts of several ranks: the order of the prompts, and how many are kept."""

from pathlib import Path

import pytest

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.train.persistence.rollout_writer import write_step, write_together
from tests.config.cases import run_with
from tests.parallel.launch import run_ranks

PROMPTS = [Prompt(f"s:{i}", "1+1", (5,)) for i in range(9)]


def rollouts_of(prompts):
    return [Rollout(p, k, (7, 8), (-0.5, 0.0), "stop", 1) for p in prompts for k in range(2)]


@pytest.mark.parametrize(("save", "kept"), [("all", 18), ("samples", 16), ("none", 0)])
def test_all_rollouts_are_kept_or_the_first_16_or_none(tmp_path, world, save, kept):
    config = run_with(run={"name": "r", "directory": str(tmp_path)}, rollout={"save": save})
    write_step(config, world, 3, rollouts_of(PROMPTS))
    path = config.run.files.rollouts(3)
    assert (read_rollouts(path) if path.exists() else []) == rollouts_of(PROMPTS)[:kept]


def write_shares(rank: int, world_size: int, directory: Path) -> None:
    for tensor in (1, 2):
        world = start_world(ParallelConfig(tensor=tensor), seed=0)
        own = rollouts_of(PROMPTS[world.data_rank :: world.data_size])
        for limit in (None, 7):
            write_together(directory / f"{tensor}_{limit}.jsonl", own, world, limit)
        stop_world()


def test_ranks_write_one_file_in_the_order_of_the_prompts(tmp_path):
    run_ranks(2, write_shares, tmp_path)
    for tensor in (1, 2):
        for limit in (None, 7):
            found = read_rollouts(tmp_path / f"{tensor}_{limit}.jsonl")
            assert found == rollouts_of(PROMPTS)[:limit]
