"""The student's optimizer: the memory of an update, and an update to infinite weights."""

from pathlib import Path

import pytest

from stable_opd_mcore.config.schema import OptimizerConfig, ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.loop import train
from stable_opd_mcore.train.student import Student
from tests.train.runs import tiny_architecture, tiny_config


def resident_mib(field: str) -> float:
    """This process's VmRSS (now) or VmHWM (maximum since the last write to clear_refs)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def update(student: Student) -> None:
    student.zero_grad()
    student.finish_grads()
    student.update(1e-3)


def test_distributed_optimizer_on_one_rank_makes_no_copies():
    """The one rank owns every shard, so an update copies neither gradients nor weights."""
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(1024, 2)), world)
    student = Student(chunks, OptimizerConfig(distributed=True), "fp32")
    weights_mib = sum(p.nbytes for chunk in chunks for p in chunk.parameters()) / 2**20
    update(student)  # allocates Adam's moments
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS:")
    update(student)
    assert resident_mib("VmHWM:") - before < 0.3 * weights_mib
    stop_world()


def test_update_to_infinite_weights_ends_the_run_before_saving(tmp_path):
    config = tiny_config(
        tmp_path,
        "run",
        optimizer={"lr": 1e38, "weight_decay": 1e38, "warmup_steps": 0},
        checkpoint={"every": 1},
    )
    with pytest.raises(UserError, match=r"step 1: nothing is saved or published: tensor model"):
        train(config, show_progress=False)
    assert not (tmp_path / "run" / "checkpoints").exists()
    stop_world()
