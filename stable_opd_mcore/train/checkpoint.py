"""Save and resume a run: Megatron's distributed checkpoint plus the run's counters, atomically.

A checkpoint is a directory `step_000100` that appears by one rename when every rank has written its
part; `state.json` in it lists every file with its size, so a damaged one is recognised and the
newest complete one wins. Any TP x PP x DP layout can read what another wrote. Not here: when to
save, or Hugging Face export.
"""

from __future__ import annotations

import json
import logging
import pickle
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

from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.student import Student

FORMAT = 1
STATE_FILE = "state.json"
# Both ends must agree on these; "fully_reshardable" is what lets another layout read the optimizer.
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
# What torch's checkpoint metadata is made of; anything else in that pickle is refused.
METADATA_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
METADATA_NAMES = {
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
}

logger = logging.getLogger(__name__)


def save_checkpoint(
    directory: Path, state: TrainState, student: Student, architecture: Architecture, keep: int
) -> Path:
    """Write `directory`/step_NNNNNN on all ranks, then drop all but the newest `keep`."""
    final = directory / f"step_{state.step:06d}"
    partial = directory / f"partial-{final.name}"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        _state_dict(student, loading=False), str(partial), content_metadata=SHARDING
    )
    save_file(_rng_state(), partial / f"rng_rank_{rank:05d}.safetensors")
    dist.barrier()
    if rank == 0:
        record = {
            "format": FORMAT,
            "state": asdict(state),
            "architecture": _shape_of(architecture),
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
        ValueError: checkpoints are there, but none is complete.
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
        raise ValueError(
            "no complete checkpoint to resume from:\n  "
            + "\n  ".join(damaged)
            + f"\nremove {directory} to start the run from its first step"
        )
    return None


def load_checkpoint(path: Path, student: Student, architecture: Architecture) -> TrainState:
    """Restore weights, optimizer and RNG of this rank in place.

    Raises:
        ValueError: another architecture or optimizer layout, or a file that is not ours.
    """
    record = json.loads((path / STATE_FILE).read_text())
    found, wanted = record["architecture"], _shape_of(architecture)
    if found != wanted:
        names = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
        raise ValueError(
            f"{path}: checkpoint of another architecture: "
            + ", ".join(
                f"{n}={found.get(n)!r} (the config's model has {wanted.get(n)!r})" for n in names
            )
            + "; use another run.name or the config it was written with"
        )
    if record["distributed_optimizer"] != student.distributed:
        raise ValueError(
            f"{path}: written with optimizer.distributed={record['distributed_optimizer']}, "
            f"resumed with {student.distributed}; set it back"
        )
    _refuse_foreign_pickle(path / ".metadata")
    loaded = dist_checkpointing.load(_state_dict(student, loading=True), str(path))
    for index, chunk in enumerate(student.model):
        chunk.module.load_state_dict(loaded[f"model{index}"])
    student.optimizer.load_state_dict(loaded["optimizer"])
    rng = path / f"rng_rank_{dist.get_rank():05d}.safetensors"
    if (
        rng.exists()
    ):  # a larger world has ranks that the checkpoint never saw: they keep their seeded state
        _restore_rng(load_file(rng))
    return TrainState(**record["state"])


def _state_dict(student: Student, loading: bool) -> dict[str, Any]:
    tree: dict[str, Any] = {
        f"model{index}": chunk.module.sharded_state_dict(metadata=SHARDING)
        for index, chunk in enumerate(student.model)
    }
    tree["optimizer"] = student.optimizer.sharded_state_dict(
        tree.copy(), is_loading=loading, metadata=SHARDING
    )
    return tree


def _shape_of(architecture: Architecture) -> dict[str, Any]:
    """What must agree between a checkpoint and the model that reads it."""
    values = asdict(architecture)
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
    named = {f"tracker.{k}": v.cpu() for k, v in get_cuda_rng_tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), **named}


def _restore_rng(saved: dict[str, torch.Tensor]) -> None:
    tracker = get_cuda_rng_tracker()
    named = {k.removeprefix("tracker."): v for k, v in saved.items() if k != "torch"}
    tracker.set_states({**tracker.get_states(), **named})
    torch.set_rng_state(saved["torch"])


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in METADATA_NAMES
        if known or (module.startswith(METADATA_MODULES) and "." not in name):
            found = super().find_class(module, name)
            if known or isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _refuse_foreign_pickle(path: Path) -> None:
    """torch reads this file with an unrestricted unpickler: let nothing but checkpoint metadata
    reach it.
    """
    try:
        with path.open("rb") as file:
            _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a checkpoint's metadata ({error}); the file may be hostile"
        ) from error
