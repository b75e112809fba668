"""One file from the rollouts of several ranks: the order of the prompts, and how many are kept."""

from pathlib import Path

import pytest

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.train.persistence.rollout_writer import RolloutWriter, write_together
from tests.parallel.launch import run_ranks

PROMPTS = [Prompt(f"s:{i}", "1+1", (5,)) for i in range(9)]


def rollouts_of(prompts):
    return [Rollout(p, k, (7, 8), (-0.5, 0.0), "stop", 1) for p in prompts for k in range(2)]


@pytest.mark.parametrize(("save", "kept"), [("all", 18), ("samples", 16)])
def test_the_writer_keeps_all_rollouts_or_the_first_16(tmp_path, world, save, kept):
    RolloutWriter(tmp_path, world, save).write(3, rollouts_of(PROMPTS))
    assert read_rollouts(RunDirectory(tmp_path).rollouts(3)) == rollouts_of(PROMPTS)[:kept]


def test_the_writer_keeps_nothing_with_save_none(tmp_path):
    RolloutWriter(tmp_path, None, "none").write(3, rollouts_of(PROMPTS))
    assert list(tmp_path.iterdir()) == []


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
