"""Rollouts drawn ahead beside their checkpoint: stored for all ranks, deleted with it, restored."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout, Routing, Segment
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.persistence import in_flight
from stable_opd_mcore.train.persistence.in_flight import restore_in_flight, save_in_flight
from tests.parallel.launch import run_ranks


def rollout(prompt: str, index: int = 0) -> Rollout:
    return Rollout(Prompt(prompt, "2+1", (5, 6)), index, (7, 8), (-0.5, -1.5), "stop", 3, "=3")


class Engine(RolloutEngine):
    """Has drawn these rollouts ahead; records what it is given."""

    def __init__(self, *drawn: Rollout, routing: Routing | None = None) -> None:
        self.drawn, self.routing = list(drawn), routing
        self.restored: dict[int, list[Rollout]] = {}

    def in_flight(self):
        return {5: self.drawn[:2], 6: self.drawn[2:]} if self.drawn else {}

    def restore(self, rollouts):
        self.restored = dict(rollouts)


def make_checkpoint(directory: Path, step: int) -> None:
    (directory / "checkpoints" / f"step_{step:06d}").mkdir(parents=True, exist_ok=True)


def stored(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "in_flight").iterdir())


def test_rollouts_of_a_checkpoint_come_back(tmp_path, world):
    segments = (Segment(1, 3), Segment(1, 4))
    unfinished = replace(rollout("s:4"), finish_reason="abort", segments=segments)
    drawn = [rollout("s:1"), rollout("s:1", 1), unfinished]
    save_in_flight(tmp_path, 4, Engine(*drawn), world)
    engine = Engine()
    restore_in_flight(tmp_path, 4, engine)
    assert engine.restored == {5: drawn[:2], 6: [unfinished]}
    save_in_flight(tmp_path, 4, Engine(*drawn[:1]), world)  # the same step after a resume
    restore_in_flight(tmp_path, 4, engine)
    assert engine.restored == {5: drawn[:1], 6: []}
    restore_in_flight(tmp_path, 3, engine)  # a checkpoint without rollouts drawn ahead
    assert engine.restored == {}


def test_what_is_stored_stays_until_it_is_written_anew(tmp_path, world, monkeypatch):
    drawn = [rollout("s:1"), rollout("s:1", 1), rollout("s:4")]
    save_in_flight(tmp_path, 4, Engine(*drawn), world)
    make_checkpoint(tmp_path, 4)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = Engine()
    with monkeypatch.context() as patched:
        patched.setattr(in_flight, "write_together", full)
        with pytest.raises(OSError, match="No space"):
            save_in_flight(tmp_path, 4, Engine(rollout("s:9")), world)
    restore_in_flight(tmp_path, 4, engine)
    assert engine.restored == {5: drawn[:2], 6: drawn[2:]}
    (tmp_path / "in_flight/step_000004/.step_000006.jsonl.0badf00d").touch()  # of a killed run
    left: Any = SimpleNamespace(in_flight=lambda: {6: drawn[:1]})
    save_in_flight(tmp_path, 4, left, world)
    restore_in_flight(tmp_path, 4, engine)
    assert engine.restored == {6: drawn[:1]}
    assert len(list((tmp_path / "in_flight/step_000004").iterdir())) == 1


def test_experts_come_back_to_an_engine_that_asks_for_them(tmp_path, world):
    experts = np.array([[[5, 1]], [[0, 7]], [[3, 2]]], np.int16)
    unfinished = replace(rollout("s:4"), finish_reason="abort", routed_experts=experts)
    save_in_flight(tmp_path, 4, Engine(unfinished), world)
    asks, does_not = Engine(routing=Routing(1, 8, 2)), Engine()
    for engine in (asks, does_not):
        restore_in_flight(tmp_path, 4, engine)
    assert asks.restored[5] == [unfinished]
    assert does_not.restored[5] == [replace(unfinished, routed_experts=None)]
    with pytest.raises(DataError, match=r"step_000004/step_000005.jsonl, line 1: .*0 .. 6"):
        restore_in_flight(tmp_path, 4, Engine(routing=Routing(1, 7, 2)))


def test_files_of_deleted_checkpoints_are_deleted(tmp_path, world, monkeypatch):
    for step in (2, 4, 6):
        save_in_flight(tmp_path, step, Engine(rollout("s:1")), world)
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step_000002").rmdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)  # another client of NFS reads one
        save_in_flight(tmp_path, 8, Engine(rollout("s:1")), world)
    assert stored(tmp_path) == [f"step_00000{step}" for step in (2, 4, 6, 8)]
    save_in_flight(tmp_path, 8, Engine(rollout("s:1")), world)  # before its checkpoint is written
    assert stored(tmp_path) == [f"step_00000{step}" for step in (4, 6, 8)]


def not_empty(*_: object, **__: object) -> None:
    raise OSError(errno.ENOTEMPTY, "Directory not empty")


def test_an_engine_that_draws_nothing_ahead_stores_nothing(tmp_path, world):
    save_in_flight(tmp_path, 2, Engine(), world)
    assert not list(tmp_path.iterdir())


def save_shares(rank: int, world_size: int, directory: str) -> None:
    world = start_world(ParallelConfig(), seed=0)
    share = [replace(rollout("s:1"), sample_index=10 * rank + i) for i in range(2)]
    save_in_flight(Path(directory), 4, Engine(*share), world)
    make_checkpoint(Path(directory), 4)
    stop_world()


def test_the_shares_of_all_ranks_are_in_one_file(tmp_path):
    run_ranks(2, save_shares, str(tmp_path))
    engine = Engine()
    restore_in_flight(tmp_path, 4, engine)
    assert [rollout.sample_index for rollout in engine.restored[5]] == [0, 1, 10, 11]
