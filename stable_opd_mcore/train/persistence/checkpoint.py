"""Save and resume a run: weights, optimizer, random generators and counters.

A checkpoint is a directory `step_000100` in Megatron's distributed form. One rename makes it appear
when every rank's part is written. Its manifest holds a checksum of every file; a run resumes from
the newest checkpoint whose files all match. Any TP x PP x DP layout reads what another wrote.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file
from torch.nn import Module

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import (
    restore_directory,
    tolerating_leftovers,
)
from stable_opd_mcore.host.run_directory import ANY_STEP, checkpoint_name
from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.models.files.directory_save import save_directory
from stable_opd_mcore.models.files.manifest import find_damage
from stable_opd_mcore.models.files.megatron_checkpoint import (
    refuse_foreign_pickle,
    require_intact,
    set_weights,
    weights_of,
)
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.lora import (
    adapt,
    base_hash,
    form_of,
    merge,
    set_factors,
    sharded_factors,
)
from stable_opd_mcore.models.weights import architecture_of, refuse_non_finite
from stable_opd_mcore.parallel.world import broadcast_object
from stable_opd_mcore.train.oversight.signals import shielded
from stable_opd_mcore.train.persistence.optimizer_state import set_state, sharded_state
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.reference import Moving
from stable_opd_mcore.train.student import Student

STATE_FILE = "state.json"
_NONE: Mapping[str, Moving] = {}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    state: TrainState
    architecture: dict[str, Any]
    reference: bool  # whether the weights of a moving reference are saved too
    versions: dict[str, str]
    teacher: bool = False  # the same of a self-teacher
    # The form of a student's low-rank factors (settings of student.lora), which are saved in place
    # of its weights, and the hash of the weights that they belong to
    factors: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    format: Literal[2] = 2


_RECORD = TypeAdapter(Record)


class CheckpointSaver:
    """Saves a run's checkpoints.

    Args:
        keep: newest checkpoints to keep, and those that their guards may return to. A later
            step's checkpoint, from which the run could not resume, stays until it is overwritten.
    """

    def __init__(
        self,
        directory: Path,
        student: Student,
        keep: int,
        moving: Mapping[str, Moving] = _NONE,
        save_tokenizer: Callable[[Path], object] = lambda _: None,
    ):
        self._directory = directory
        self._student = student
        self._moving = moving
        self._keep = keep
        self._save_tokenizer = save_tokenizer

    def save(self, state: TrainState) -> Path:
        """Write the checkpoint of `state`, delete those no longer needed, and return its
        directory. Collective.

        Raises:
            UserError: a rank could not write; older checkpoints are untouched.
        """
        path = self._directory / checkpoint_name(state.step)
        if dist.get_rank() == 0:
            for left in self._directory.glob(f"partial-{ANY_STEP}"):
                with tolerating_leftovers(left):
                    shutil.rmtree(left)  # a killed run left it
        with shielded():
            self._write(path, state)
        if dist.get_rank() == 0:
            so_far = sorted(old for old in self._directory.glob(ANY_STEP) if old.name <= path.name)
            kept = so_far[-self._keep :]
            returned_to = {name for path in kept for name in _returns_to(path)}
            for old in so_far[: -self._keep]:
                if old.name not in returned_to:
                    with tolerating_leftovers(old):
                        shutil.rmtree(old)  # one deleted in part differs from its manifest
        dist.barrier()
        return path

    def _write(self, path: Path, state: TrainState) -> None:
        record = Record(
            state,
            _shape_of(self._student),
            "reference" in self._moving,
            {name: version(name) for name in ("torch", "megatron-core")},
            "teacher" in self._moving,
            form_of(self._student.chunks),
            self._student.base_hash,
        )

        def describe(path: Path) -> None:
            (path / STATE_FILE).write_text(json.dumps(asdict(record), indent=1))
            self._save_tokenizer(path)

        rng_file = f"rng_rank_{dist.get_rank():05d}.safetensors"
        save_directory(
            _state_dict(self._student, self._moving, loading=False),
            self._student.chunks,
            path,
            describe=describe,
            add_own_files=lambda path: save_tensors(_rng_state(), path / rng_file),
        )


def _returns_to(path: Path) -> set[str]:
    """Checkpoints that the guard may need when a run resumes from `path`: their names."""
    try:
        guard = _read_record(path).state.guard
    except (OSError, ValueError):
        return set()  # damaged: no run resumes from it
    return {checkpoint_name(step) for step in guard.kept_saves}


def restore_replaced(directory: Path) -> None:
    """Rename a checkpoint back that a killed run had renamed aside, to replace it. On rank 0 of the
    run that holds the directory's lock: an evaluation at the same time must not.
    """
    for aside in sorted(directory.glob(f".{ANY_STEP}.old")):
        restore_directory(directory / aside.name.removeprefix(".").removesuffix(".old"))


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest intact checkpoint, None if there is no checkpoint at all.

    Collective: all ranks verify a share of each checkpoint and get the same answer. Rank 0 logs a
    line with the damaged file for every checkpoint that it skips.

    Raises:
        UserError: there are checkpoints, but all are damaged.
    """
    damaged = []
    for path in broadcast_object(sorted(directory.glob(ANY_STEP), reverse=True)):
        fault = find_fault(path)
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


def load_checkpoint(
    path: Path, student: Student, moving: Mapping[str, Moving] = _NONE
) -> TrainState:
    """Restore weights, optimizer and RNG of this rank in place.

    A model of `moving` keeps its weights if the checkpoint has none: they did not move in its run.

    Raises:
        UserError: another architecture, or a file that is not ours.
    """
    record = _read_record(path)
    found, wanted = record.architecture, _shape_of(student)
    if unknown := sorted(wanted.keys() ^ found.keys()):
        raise UserError(
            f"{path}: written by another version of this program, which describes architectures "
            f"with other names ({', '.join(unknown)}): finish the run with that version, or use "
            "another run.name"
        )
    names = sorted(name for name in wanted if found[name] != wanted[name])
    if names:
        raise UserError(
            f"{path}: checkpoint of another architecture: "
            + ", ".join(
                f"{n}={found[n]!r} (the config's model has {wanted.get(n)!r})" for n in names
            )
            + "; use another run.name or the config it was written with"
        )
    _refuse_other_factors(path, record, form_of(student.chunks))
    _refuse_other_base(path, record, student.base_hash)
    refuse_foreign_pickle(path)
    moving = {name: model for name, model in moving.items() if getattr(record, name)}
    wanted_state = _state_dict(student, moving, loading=True)
    loaded: Any = dist_checkpointing.load(wanted_state, str(path))
    for name, model in moving.items():
        model.load(loaded.pop(name), f"{path}: the {name}")
    if record.factors:
        set_factors(student.chunks, loaded["factors"])
    else:
        set_weights(student.chunks, loaded)
    refuse_non_finite(student.chunks, str(path))
    set_state(student.optimizer, loaded["optimizer"])
    rng = path / f"rng_rank_{dist.get_rank():05d}.safetensors"
    if rng.exists():  # else a larger world's rank, which keeps its seeded state
        _restore_rng(load_file(rng))
    return record.state


def merge_factors(chunks: Sequence[Module], path: Path) -> None:
    """Add a checkpoint's factors to the weights to which they belong. Collective.

    Raises:
        UserError: other weights, or a checkpoint that is damaged or not ours.
    """
    record = _read_record(require_intact(path))
    adapt(chunks, LoraConfig(**_form_of(record)))
    _refuse_other_base(path, record, base_hash(chunks))
    loaded: Any = dist_checkpointing.load({"factors": sharded_factors(chunks)}, str(path))
    set_factors(chunks, loaded["factors"])
    refuse_non_finite(chunks, str(path))
    merge(chunks)


def _form_of(record: Record) -> dict[str, Any]:
    """The factors' form. Checkpoints of version 0.1.0 also name an `expert_alpha`: their alpha."""
    return {key: value for key, value in record.factors.items() if key != "expert_alpha"}


def _refuse_other_factors(path: Path, record: Record, wanted: dict[str, Any]) -> None:
    """Raise a UserError if the checkpoint's low-rank factors have another form."""
    found = _form_of(record)
    if found != wanted:
        texts = [
            "student.lora with " + ", ".join(f"{key}={_text(form[key])}" for key in form)
            if form
            else "student.lora=null"
            for form in (found, wanted)
        ]
        raise UserError(
            f"{path}: checkpoint of a run with {texts[0]}, but the config has {texts[1]}; use "
            "another run.name or the config it was written with"
        )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _refuse_other_base(path: Path, record: Record, base: str | None) -> None:
    """Raise a UserError if the checkpoint's factors belong to weights of another hash."""
    if record.base != base:
        raise UserError(
            f"{path}: its low-rank factors belong to weights with the hash {record.base}, but "
            f"those of student.path have {base}; give the model, or the train.seed of random "
            "weights, and the train.precision that the run began with"
        )


def _state_dict(student: Student, moving: Mapping[str, Moving], loading: bool) -> dict[str, Any]:
    has_factors = bool(factors_of(student.chunks))
    tree: dict[str, Any] = (
        {"factors": sharded_factors(student.chunks)} if has_factors else weights_of(student.chunks)
    )
    tree["optimizer"] = sharded_state(student.optimizer, tree, loading=loading)
    for name, model in moving.items():
        kept = model.saved()
        add_prefix_for_sharding(kept, f"{name}.")
        tree[name] = kept
    return tree


def _shape_of(student: Student) -> dict[str, Any]:
    """What must agree between a checkpoint and the model that reads it, as JSON has it."""
    values = asdict(replace(architecture_of(student.chunks), source={}))
    del values["source"], values["initializer_range"]
    return json.loads(json.dumps(values))


def find_fault(path: Path) -> str | None:
    """Why a checkpoint cannot be used, None if it is complete. Collective."""
    fault = find_damage(path)
    if fault is None and dist.get_rank() == 0:
        try:
            _read_record(path)
        except (OSError, ValueError) as error:
            fault = f"{STATE_FILE} cannot be used ({error})"
    return broadcast_object(fault)


def _read_record(path: Path) -> Record:
    """The content of state.json; ValueError if it is not what `CheckpointSaver` writes."""
    try:
        return _RECORD.validate_json((path / STATE_FILE).read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _rng_state() -> dict[str, torch.Tensor]:
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
