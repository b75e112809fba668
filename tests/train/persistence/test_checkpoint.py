"""Checkpoints: damage is reported with its file, and the newest undamaged checkpoint is used."""

import errno
import logging
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.config.schema import OptimizerConfig, ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.manifest import MANIFEST
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence.checkpoint import (
    CheckpointSaver,
    load_checkpoint,
    newest_checkpoint,
    restore_replaced,
)
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.student import Student
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_architecture


def make_student(tensor: int = 1) -> Student:
    world = start_world(ParallelConfig(tensor=tensor), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(32, 2)), world)
    student = Student(chunks, OptimizerConfig(), "fp32")
    student.zero_grad()
    student.finish_grads()
    student.update(1e-3)  # creates the optimizer's state
    return student


def save(directory: Path, state: TrainState, student: Student, keep: int) -> Path:
    return CheckpointSaver(directory, student, keep).save(state)


@pytest.fixture(scope="module")
def student():
    yield make_student()
    stop_world()


@pytest.fixture(scope="module")
def saved(student: Student, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    for step in (2, 4):
        save(directory, TrainState(step=step), student, keep=2)
    return directory


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = (
    "__0_0.distcp",
    ".metadata",
    "metadata.json",
    "config.json",
    "rng_rank_00000.safetensors",
    "state.json",
    MANIFEST,
)
UNEXPECTED_JSON = (
    "[]",
    "{}",
    '{"files": 3}',
    "[" * 100_000,
    "\xff",
    "null",
    '{"files": {}, "xxh3": 1}',
)


@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_is_reported_and_an_older_one_is_used(
    checkpoints: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Files that are absent, cut or no files: tests/models/files/test_manifest.py."""
    flip(checkpoints / "step_000004" / name)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(checkpoints) == checkpoints / "step_000002"
    (line,) = caplog.messages
    assert name in line


@pytest.mark.parametrize("text", UNEXPECTED_JSON)
def test_unexpected_json_is_damage(checkpoints: Path, text: str) -> None:
    (checkpoints / "step_000004" / MANIFEST).write_text(text, encoding="latin-1")
    assert newest_checkpoint(checkpoints) == checkpoints / "step_000002"


def test_error_names_the_damaged_file_of_every_checkpoint(checkpoints: Path) -> None:
    flip(checkpoints / "step_000004" / "metadata.json")
    flip(checkpoints / "step_000002" / "state.json")
    with pytest.raises(UserError, match=r"(?s)_000004: metadata.json .*_000002: state.json "):
        newest_checkpoint(checkpoints)
    shutil.rmtree(checkpoints)  # to start from the first step
    assert newest_checkpoint(checkpoints) is None


def test_new_checkpoints_are_kept_after_a_later_damaged_one(
    checkpoints: Path, student: Student
) -> None:
    """Step 4 is damaged and the run resumes from step 2: step 3, saved with keep=1, must stay."""
    flip(checkpoints / "step_000004" / "__0_0.distcp")
    save(checkpoints, TrainState(step=3), student, keep=1)
    assert newest_checkpoint(checkpoints) == checkpoints / "step_000003"
    save(checkpoints, TrainState(step=4), student, keep=1)
    assert [path.name for path in checkpoints.iterdir()] == ["step_000004"]
    assert newest_checkpoint(checkpoints) == checkpoints / "step_000004"


class Killed(BaseException):
    """Ends a save where SIGKILL would."""


def test_a_checkpoint_is_replaced_or_stays(
    checkpoints: Path, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a file that another client of NFS reads, and killed between the two renames."""
    path = checkpoints / "step_000004"
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        save(checkpoints, TrainState(step=4, cursor=7), student, keep=2)
    assert newest_checkpoint(checkpoints) == path
    assert load_checkpoint(path, student).cursor == 7
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith("partial-"):
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            save(checkpoints, TrainState(step=4), student, keep=2)
    restore_replaced(checkpoints)
    assert newest_checkpoint(checkpoints) == path
    assert load_checkpoint(path, student).cursor == 7
    save(checkpoints, TrainState(step=4), student, keep=2)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000002", "step_000004"]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(
    checkpoints: Path, student: Student, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    (checkpoints / "partial-step_000003").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        save(checkpoints, TrainState(step=6), student, keep=2)
    assert [line.split(":")[0] for line in caplog.messages] == [
        str(checkpoints / name) for name in ("partial-step_000003", "step_000002")
    ]
    for name in ("step_000006", "step_000004"):
        shutil.rmtree(checkpoints / name)
    with pytest.raises(UserError, match=r"step_000002: manifest.json cannot be used"):
        newest_checkpoint(checkpoints)
    save(checkpoints, TrainState(step=8), student, keep=1)
    assert [path.name for path in checkpoints.iterdir()] == ["step_000008"]


def not_empty(*_: object, **__: object) -> None:
    raise OSError(errno.ENOTEMPTY, "Directory not empty")


@pytest.mark.parametrize("max_file_bytes", [100, 100_000])
def test_failed_save_keeps_older_checkpoints_and_reports_the_space(
    checkpoints: Path, student: Student, max_file_bytes: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, before[1]))  # writes fail with EFBIG
    try:
        with pytest.raises(UserError, match=r"step_000006: cannot .* needed 0.\d MiB, free .*MiB"):
            save(checkpoints, TrainState(step=6), student, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000002", "step_000004"]
    assert newest_checkpoint(checkpoints) == checkpoints / "step_000004"


def test_non_finite_weights_are_not_loaded(student: Student, tmp_path: Path) -> None:
    weight = student.chunks[0].decoder.final_layernorm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[3] = torch.nan
    path = save(tmp_path, TrainState(step=1), student, keep=1)
    with pytest.raises(UserError, match=r"step_000001: tensor model.norm.weight holds NaN"):
        load_checkpoint(path, student)
    with torch.no_grad():
        weight.copy_(before)


def test_a_checkpoint_of_another_architecture_is_refused(
    saved: Path, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = replace(student.chunks[0].architecture, hidden_size=64)
    monkeypatch.setattr(student.chunks[0], "architecture", wider)
    with pytest.raises(UserError, match=r"another arch.*hidden_size=32 \(the .* model has 64\)"):
        load_checkpoint(saved / "step_000004", student)
    monkeypatch.undo()
    load_checkpoint(saved / "step_000004", student)


def test_all_ranks_use_the_same_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, damage_and_resume, tmp_path)


def damage_and_resume(rank: int, world_size: int, directory: Path) -> None:
    student = make_student(tensor=2)
    for step in (1, 2, 3):
        save(directory, TrainState(step=step), student, keep=3)
    if rank == 0:
        flip(directory / "step_000003" / "__1_0.distcp")
        flip(directory / "step_000002" / "rng_rank_00001.safetensors")
    torch.distributed.barrier()
    newest = newest_checkpoint(directory)
    assert newest == directory / "step_000001"
    assert load_checkpoint(newest, student) == TrainState(step=1)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match="step_000004: cannot be written"):
        save(directory, TrainState(step=4), student, keep=3)
    assert newest_checkpoint(directory) == newest
    stop_world()
