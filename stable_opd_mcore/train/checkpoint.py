"""Save and resume a run: Megatron's distributed checkpoint plus the run's counters, atomically.

A checkpoint is a directory `step_000100` that appears by one rename when every rank has written its
part; `state.json` in it lists every file with its size, so a damaged one is recognised and the
newest complete one wins. Any TP x PP x DP layout can read what another wrote. Not here: when to
save, or Hugging Face export.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.megatron_checkpoint import (
    describe_weights,
    refuse_foreign_pickle,
    save_sharded,
    sharding,
    weights_of,
)
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.student import Student

FORMAT = 1
STATE_FILE = "state.json"
logger = logging.getLogger(__name__)


def save_checkpoint(directory: Path, state: TrainState, student: Student, keep: int) -> Path:
    """Write `directory`/step_NNNNNN on all ranks, then drop all but the newest `keep`."""
    final = directory / f"step_{state.step:06d}"
    partial = directory / f"partial-{final.name}"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    save_sharded(_state_dict(student, loading=False), partial)
    save_file(_rng_state(), partial / f"rng_rank_{rank:05d}.safetensors")
    dist.barrier()
    if rank == 0:
        describe_weights(student.chunks, partial)
        record = {
            "format": FORMAT,
            "state": asdict(state),
            "architecture": _shape_of(student),
            "distributed_optimizer": student.distributed,
            "versions": {name: version(name) for name in ("torch", "megatron-core")},
            "files": {p.name: p.stat().st_size for p in sorted(partial.iterdir())},
        }
        (partial / STATE_FILE).write_text(json.dumps(record, indent=1))
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        for old in sorted(directory.glob("step_*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, None when there is none.

    Damaged ones are passed over with a warning.

    Raises:
        UserError: checkpoints are there, but none is complete.
    """
    damaged = []
    for path in sorted(directory.glob("step_*"), reverse=True):
        fault = _fault(path)
        if fault is None:
            for line in damaged:
                logger.warning("passing over %s; resuming from %s", line, path)
            return path
        damaged.append(f"{path}: {fault}")
    if damaged:
        raise UserError(
            "no complete checkpoint to resume from:\n  "
            + "\n  ".join(damaged)
            + f"\nremove {directory} to start the run from its first step"
        )
    return None


def load_checkpoint(path: Path, student: Student) -> TrainState:
    """Restore weights, optimizer and RNG of this rank in place.

    Raises:
        UserError: another architecture or optimizer layout, or a file that is not ours.
    """
    record = json.loads((path / STATE_FILE).read_text())
    found, wanted = record["architecture"], _shape_of(student)
    if found != wanted:
        names = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
        raise UserError(
            f"{path}: checkpoint of another architecture: "
            + ", ".join(
                f"{n}={found.get(n)!r} (the config's model has {wanted.get(n)!r})" for n in names
            )
            + "; use another run.name or the config it was written with"
        )
    if record["distributed_optimizer"] != student.distributed:
        raise UserError(
            f"{path}: written with optimizer.distributed={record['distributed_optimizer']}, "
            f"resumed with {student.distributed}; set it back"
        )
    refuse_foreign_pickle(path)
    loaded: Any = dist_checkpointing.load(_state_dict(student, loading=True), str(path))
    for index, chunk in enumerate(student.model):
        chunk.module.load_state_dict(loaded[f"model{index}"])
    student.optimizer.load_state_dict(loaded["optimizer"])
    rng = path / f"rng_rank_{dist.get_rank():05d}.safetensors"
    if rng.exists():  # else a larger world's rank, which keeps its seeded state
        _restore_rng(load_file(rng))
    return TrainState(**record["state"])


def _state_dict(student: Student, loading: bool) -> dict[str, Any]:
    tree = weights_of(student.chunks)
    tree["optimizer"] = student.optimizer.sharded_state_dict(
        tree.copy(), is_loading=loading, metadata=sharding()
    )
    return tree


def _shape_of(student: Student) -> dict[str, Any]:
    """What must agree between a checkpoint and the model that reads it."""
    values = asdict(architecture_of(student.chunks))
    return {name: values[name] for name in values.keys() - {"source", "initializer_range"}}


def _fault(path: Path) -> str | None:
    """Why a checkpoint directory cannot be used, None when it is complete."""
    try:
        record = json.loads((path / STATE_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        return f"half-written ({STATE_FILE}: {error})"
    if record.get("format") != FORMAT:
        return f"format {record.get('format')!r}, this version reads {FORMAT}"
    for name, size in record["files"].items():
        file = path / name
        if not file.is_file():
            return f"half-written ({name} is missing)"
        if file.stat().st_size != size:
            return f"half-written ({name} has {file.stat().st_size} bytes, {size} were written)"
    return None


def _rng_state() -> dict[str, torch.Tensor]:
    """The generators that dropout draws from: torch's own and Megatron's named ones."""
    named = {f"tracker.{k}": v.cpu() for k, v in _tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), **named}


def _tracker() -> Any:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "start_world seeds it"
    return tracker


def _restore_rng(saved: dict[str, torch.Tensor]) -> None:
    tracker = _tracker()
    named = {k.removeprefix("tracker."): v for k, v in saved.items() if k != "torch"}
    tracker.set_states({**tracker.get_states(), **named})
    torch.set_rng_state(saved["torch"])
