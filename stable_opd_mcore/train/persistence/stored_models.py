"""What a directory says of the model in it, and of the run that trained it.

A model is a Hugging Face directory, a Megatron checkpoint or an adapter that PEFT has saved. What
is inside a run's directory has that run's settings.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.changes import read_settings
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.run_directory import RunDirectory, checkpoint_name
from stable_opd_mcore.models.files.megatron_checkpoint import is_megatron
from stable_opd_mcore.models.files.peft_directory import base_of, is_adapter
from stable_opd_mcore.models.files.small_files import TRAINED
from stable_opd_mcore.train.persistence.checkpoint import STATE_FILE

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class StoredModel:
    path: Path  # a Hugging Face directory, a Megatron checkpoint or an adapter
    name: str  # the results' name: the run's step, or the directory's name
    run: str | None = None  # the name of the run that trained it, where it is known
    step: int | None = None
    is_whole: bool = True  # False: low-rank factors without the weights to which they are added


def model_in(path: Path) -> StoredModel:
    """What the directory says of the model in it. Raises a UserError if it is not what we write."""
    run = run_of(path)
    file = path / (STATE_FILE if is_megatron(path) else TRAINED)
    try:
        record: Any = json.loads(file.read_bytes()) if file.is_file() else {}
        step = record.get("state", record).get("step")
        name = record.get("run") or (run.name if run is not None else None)
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: not what a run writes ({error}); restore it") from error
    if type(step) is not int or step < 0:
        step = None
    is_whole = not (is_adapter(path) or record.get("factors"))
    own = checkpoint_name(step) if step is not None and run is not None else path.absolute().name
    label = _NOT_IN_NAMES.sub("_", own).lstrip("._-") or "model"
    return StoredModel(path, label, name if isinstance(name, str) else None, step, is_whole)


def run_of(path: Path) -> Path | None:
    """The run's directory that `path` is, or whose model or checkpoint it is; None without one."""
    path = path.absolute()
    parents = (path, path.parent, path.parent.parent)
    return next((parent for parent in parents if RunDirectory(parent).resolved.is_file()), None)


def run_settings(path: Path) -> dict[str, Any]:
    """The settings of the run in whose directory `path` is; empty without one."""
    run = run_of(path)
    return {} if run is None else read_settings(RunDirectory(run).resolved)


def weights_under(model: StoredModel) -> dict[str, Any]:
    """Where the model's weights are, or those that its factors are added to, as settings of a
    student."""
    if model.is_whole:
        return {"path": str(model.path)}
    if trained := run_settings(model.path):
        keys = ("path", "architecture", "window", "rope_theta")
        return {key: trained["student"].get(key) for key in keys}
    if is_adapter(model.path):
        return base_of(model.path)
    raise UserError(
        f"{model.path}: a checkpoint of student.lora without its run, whose settings name the "
        "model under the factors; give the run's directory, or its model/ or adapter/"
    )


def mark_trained(directory: Path, run: str, step: int, **more: Any) -> None:
    """Note in an exported model which run's step it is from."""
    text = json.dumps({"run": run, "step": step, **more}) + "\n"
    write_atomically(directory / TRAINED, text.encode())
