"""Save and resume a run: weights, optimizer, random generators and counters.

A checkpoint is a directory `step_000100` in Megatron's distributed form. Processes beside the ranks
write it while the ranks train on. One rename makes it appear when every rank's part is written. Its
manifest holds a checksum of every file; a run resumes from the newest checkpoint whose files all
match. Any TP x PP x DP layout reads what another wrote. Not here: when to save, Hugging Face
export.
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
from stable_opd_mcore.models.directory_save import DirectorySave, begin_save
from stable_opd_mcore.models.manifest import MANIFEST, find_damage, has_manifest
from stable_opd_mcore.models.megatron_checkpoint import (
    refuse_foreign_pickle,
    set_weights,
    weights_of,
)
from stable_opd_mcore.models.weights import architecture_of, refuse_non_finite
from stable_opd_mcore.parallel.world import broadcast_object
from stable_opd_mcore.train.optimizer_state import set_state, sharded_state
from stable_opd_mcore.train.signals import shielded
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.student import Student

FORMATS = (1, 2)  # 1: file sizes in state.json; 2: checksums in the manifest
STATE_FILE = "state.json"
logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves a run's checkpoints, one at a time, in the background. All methods are collective.

        saver = CheckpointSaver(directory, student, keep=2)
        path = saver.begin(state)       # the tensors may change once it returns
        saver.poll()                    # after each step: completes what has been written
        saver.finish()                  # before the run ends

    A checkpoint exists once `poll` or `finish` has completed it: its manifest is written last, then
    one rename makes it appear. A run that is killed before resumes from the one before it.

    Args:
        directory: of the checkpoints `step_NNNNNN`.
        keep: newest checkpoints to keep. A later step's checkpoint, from which the run could not
            resume, stays until it is overwritten.
    """

    def __init__(self, directory: Path, student: Student, keep: int):
        self._directory = directory
        self._student = student
        self._keep = keep
        self._pending: tuple[Path, DirectorySave] | None = None

    def begin(self, state: TrainState) -> Path:
        """Complete the previous checkpoint, then begin to save `state`.

        Returns:
            The directory in which it will appear.

        Raises:
            UserError: a rank could not write; older checkpoints are untouched.
        """
        self.finish()
        path = self._directory / f"step_{state.step:06d}"
        if dist.get_rank() == 0:
            for left in self._directory.glob("partial-step_*"):
                shutil.rmtree(left)  # by a run that was killed
        with shielded():
            self._pending = (path, _begin_save(path, state, self._student))
        return path

    def poll(self) -> None:
        """Complete the checkpoint if all ranks have written it; UserError if one could not."""
        if self._pending is not None and self._pending[1].is_written():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint and complete it; UserError if a rank could not write."""
        if self._pending is None:
            return
        (path, save), self._pending = self._pending, None
        with shielded():
            save.finish()
        if dist.get_rank() == 0:
            so_far = sorted(old for old in self._directory.glob("step_*") if old.name <= path.name)
            for old in so_far[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()


def _begin_save(path: Path, state: TrainState, student: Student) -> DirectorySave:
    rank = dist.get_rank()
    record = {
        "format": FORMATS[-1],
        "state": asdict(state),
        "architecture": _shape_of(student),
        "distributed_optimizer": student.distributed,
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }
    return begin_save(
        _state_dict(student, loading=False),
        student.chunks,
        path,
        describe=lambda path: (path / STATE_FILE).write_text(json.dumps(record, indent=1)),
        add_own_files=lambda path: save_file(
            _rng_state(), path / f"rng_rank_{rank:05d}.safetensors"
        ),
    )


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest intact checkpoint, None if there is no checkpoint at all.

    Collective: all ranks verify a share of each checkpoint and get the same answer. Rank 0 logs a
    line with the damaged file for every checkpoint that it skips.

    Raises:
        UserError: there are checkpoints, but all are damaged.
    """
    damaged = []
    for path in broadcast_object(sorted(directory.glob("step_*"), reverse=True)):
        fault = _find_fault(path)
        if fault is None:
            if dist.get_rank() == 0:
                for line in damaged:
                    logger.warning("skipping %s; resuming from %s", line, path)
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
    record = _read_record(path)
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
    set_weights(student.chunks, loaded)
    refuse_non_finite(student.chunks, str(path))
    set_state(student.optimizer, loaded["optimizer"])
    rng = path / f"rng_rank_{dist.get_rank():05d}.safetensors"
    if rng.exists():  # else a larger world's rank, which keeps its seeded state
        _restore_rng(load_file(rng))
    return TrainState(**record["state"])


def _state_dict(student: Student, loading: bool) -> dict[str, Any]:
    tree = weights_of(student.chunks)
    tree["optimizer"] = sharded_state(student.optimizer, tree, loading=loading)
    return tree


def _shape_of(student: Student) -> dict[str, Any]:
    """What must agree between a checkpoint and the model that reads it."""
    values = asdict(architecture_of(student.chunks))
    return {name: values[name] for name in values.keys() - {"source", "initializer_range"}}


def _find_fault(path: Path) -> str | None:
    """Why a checkpoint cannot be used, None if it is complete. Collective."""
    has_checksums = has_manifest(path)
    fault = find_damage(path) if has_checksums else None
    if fault is None and dist.get_rank() == 0:
        try:
            record = _read_record(path)
            if not has_checksums:
                _check_sizes(path, record)
        except (OSError, ValueError, RecursionError) as error:
            fault = str(error)
    fault = broadcast_object(fault)
    if fault is None and not has_checksums and dist.get_rank() == 0:
        logger.warning("%s: not verified: an earlier version wrote it without checksums", path)
    return fault


def _read_record(path: Path) -> dict[str, Any]:
    """The content of state.json; ValueError if it is not what `_begin_save` writes."""
    try:
        record: Any = json.loads((path / STATE_FILE).read_bytes())
        counters = TrainState(**record["state"])
        kinds = {type(value) for value in asdict(counters).values()}
        if kinds != {int} or not isinstance(record["architecture"], dict):
            raise TypeError("counters or architecture of another type")
        record["distributed_optimizer"]
    except FileNotFoundError:
        raise ValueError(f"half-written ({STATE_FILE} is missing)") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{STATE_FILE} cannot be used ({error})") from None
    if record.get("format") not in FORMATS:
        raise ValueError(f"format {record.get('format')!r}, this version reads {FORMATS}")
    return record


def _check_sizes(path: Path, record: dict[str, Any]) -> None:
    """Compare with the file sizes that format 1 recorded; check the metadata before unpickling."""
    if record["format"] != 1 or not isinstance(record.get("files"), dict):
        raise ValueError(f"half-written ({MANIFEST} is missing)")
    for name, size in record["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"half-written ({name} is missing)")
        if file.stat().st_size != size:
            raise ValueError(f"half-written ({name} has {file.stat().st_size} of {size} bytes)")
    refuse_foreign_pickle(path)


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
