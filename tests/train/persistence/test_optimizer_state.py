"""The optimizer's state is saved without a gather, and any layout and the older form load it."""

from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stable_opd_mcore.config.schema import OptimizerConfig, ParallelConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.directory_save import sharding
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence import checkpoint
from stable_opd_mcore.train.persistence.checkpoint import CheckpointSaver, load_checkpoint
from stable_opd_mcore.train.persistence.optimizer_state import boxes
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.student import Student
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_architecture

LAYOUTS = ({}, {"tensor": 2}, {"tensor": 2, "pipeline": 2})


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 2), (1, 5), (4, 1)])
def test_boxes_cover_every_range_in_order(shape: tuple[int, ...]) -> None:
    values = torch.arange(prod(shape)).view(shape)
    for begin in range(values.numel()):
        for end in range(begin, values.numel() + 1):
            found = list(boxes(shape, begin, end))
            assert len(found) <= 2 * len(shape) - 1
            cut = [values[tuple(map(slice, o, map(sum, zip(o, s, strict=True))))] for o, s in found]
            assert [x for part in cut for x in part.flatten().tolist()] == list(range(begin, end))


def test_each_layout_loads_what_another_saved_and_what_megatrons_form_holds(
    tmp_path: Path,
) -> None:
    run_ranks(4, _save_and_load, tmp_path)


def _save_and_load(rank: int, world_size: int, directory: Path) -> None:
    for number, layout in enumerate(LAYOUTS, start=1):
        student = _student(layout, precision="bf16", seed=5)
        path = CheckpointSaver(directory, student, keep=9).save(TrainState(step=number))
        expected = _student(layout, precision="bf16", seed=5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "sharded_state", _megatrons_form)
            older = CheckpointSaver(directory / "older", expected, keep=9)
            older.save(TrainState(step=number))
        stop_world()
        other = LAYOUTS[number % len(LAYOUTS)]
        loaded = _student(other, precision="bf16", seed=6)
        assert load_checkpoint(path, loaded) == TrainState(step=number)
        found = _full_state(loaded)
        load_checkpoint(directory / "older" / path.name, loaded)
        for name, value in _full_state(loaded).items():
            assert torch.equal(found[name], value), f"{layout} to {other}: {name}"
        assert loaded.optimizer.param_groups[0]["step"] == 1
        stop_world()


def _megatrons_form(optimizer, weights, *, loading):
    return optimizer.sharded_state_dict(weights.copy(), is_loading=loading, metadata=sharding())


def _student(layout: dict[str, int], precision: str, seed: int) -> Student:
    world = start_world(ParallelConfig(**layout), seed=0)
    architecture = read_architecture(tiny_architecture(32, 2))
    chunks = build_model(architecture, world, precision=precision, seed=seed)
    student = Student(chunks, OptimizerConfig(), precision)
    student.zero_grad()
    for chunk in student.model:
        for weight in chunk.parameters():
            weight.main_grad.copy_(weight.detach().float() * 3)
    student.finish_grads()
    student.update(1e-3)
    return student


def _full_state(student: Student) -> dict[str, torch.Tensor]:
    """This rank's state by HF-independent position: Megatron's own tensors, flat."""
    (inner,) = student.optimizer.chained_optimizers
    state = {}
    for index, group in enumerate(inner.optimizer.param_groups):
        for number, main in enumerate(group["params"]):
            tensors = {"param": main, **inner.optimizer.state[main]}
            for name, value in tensors.items():
                if torch.is_tensor(value):
                    state[f"{index}.{number}.{name}"] = value.detach().clone()
    assert state, dist.get_rank()
    return state
