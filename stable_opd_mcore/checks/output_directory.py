"""The run directory: locked by another run, trained with other settings, not writable, too small.

`train` calls `settings_changes` too. Not here: the lock itself (host/run_lock.py).
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stable_opd_mcore.checks.finding import Finding, finding
from stable_opd_mcore.checks.input_hashes import changed_inputs
from stable_opd_mcore.checks.lazy_inputs import RunInputs
from stable_opd_mcore.config.changes import changes, read_settings
from stable_opd_mcore.config.cold_start import after_cold_start
from stable_opd_mcore.config.guard_settings import HEALTHY_AFTER, MOST_STEPS_BETWEEN_SAVES
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.atomic_files import naming_disk_errors
from stable_opd_mcore.host.run_directory import ANY_STEP
from stable_opd_mcore.host.run_lock import (
    STALE_SECONDS,
    RunLock,
    describe,
    heartbeat,
    in_use,
    is_here,
)
from stable_opd_mcore.planning.hardware import GIB
from stable_opd_mcore.planning.layout import Layout
from stable_opd_mcore.planning.model_size import ADAM_BYTES, WEIGHT_BYTES, ModelSize


def settings_changes(config: Config, accepted: bool) -> dict[str, tuple[Any, Any]]:
    """Settings, and contents of files, that differ from those with which the run directory's
    checkpoints were trained.

    Empty without checkpoints: the run then starts from the beginning.

    Raises:
        ConfigError: there are some, and they are not `accepted`.
    """
    files = config.run.files
    stored = files.resolved
    if not any(files.checkpoints.glob(ANY_STEP)):
        return {}
    if not stored.is_file():
        if accepted:
            return {}
        raise ConfigError(
            f"{files.path} has checkpoints but no {stored.name}, so the settings and files that "
            "they were trained with are not known: restore it, start a new run with another "
            "run.name, or resume with the settings of the command line: --accept-changes"
        )
    differences = changes(read_settings(stored), config) | changed_inputs(config)
    if differences and not accepted:
        lines = "\n".join(f"  {key}: {old} -> {new}" for key, (old, new) in differences.items())
        raise ConfigError(
            f"{files.path} was trained with other settings or files "
            f"({stored}, {files.inputs.name}):\n{lines}\n"
            "Set them back, start a new run with another run.name, or resume with the new ones: "
            "--accept-changes"
        )
    return differences


def writable(inputs: RunInputs) -> None:
    """A run directory that cannot be written; `train` refuses it in the same words."""
    home = inputs.config.run.path
    place = _existing(home)
    with naming_disk_errors(home):
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(home))
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(home))


def other_run(inputs: RunInputs) -> Iterator[Finding]:
    """A run directory that another run holds; `train` refuses it in the same words.

    On another machine only the heartbeat shows whether the holder lives; `train` waits for it.
    """
    home = inputs.config.run.path
    lock = RunLock(home)
    holder, beat = lock.holder(), heartbeat(lock.path)
    if holder is None or beat is None:
        return
    age = time.time() - beat
    if is_here(holder):
        raise in_use(home, holder)
    if age < STALE_SECONDS:
        yield finding(
            "held-elsewhere", home=home, holder=describe(holder), age=age, stale=STALE_SECONDS
        )


def other_settings(inputs: RunInputs) -> Iterator[Finding]:
    """A run that would be resumed with other settings."""
    config = inputs.config
    if config.cold_start is not None:
        config = after_cold_start(config)
    for key, (old, new) in settings_changes(config, inputs.accept_changes).items():
        yield finding("changed-setting", key=key, old=old, new=new)


def rare_checkpoints(inputs: RunInputs) -> Iterator[Finding]:
    """Checkpoints so rare that a guard that may act has none to return to in an early collapse."""
    every = inputs.config.checkpoint.every
    if inputs.config.guard.acts and every > MOST_STEPS_BETWEEN_SAVES:
        yield finding(
            "rare-checkpoints",
            every=every,
            healthy_after=HEALTHY_AFTER,
            first=every + HEALTHY_AFTER,
            enough=MOST_STEPS_BETWEEN_SAVES,
        )


def disk(inputs: RunInputs) -> Iterator[Finding]:
    """Less free space than the checkpoints and the exported model take."""
    config, size = inputs.config, ModelSize(inputs.architecture, Layout(1))
    element, state = WEIGHT_BYTES[config.train.precision], ADAM_BYTES[config.train.precision]
    model = element * size.total_parameters()
    checkpoint = model + state * size.total_parameters()
    if lora := config.student.lora:  # a checkpoint holds only the factors; an adapter is exported
        factors = size.factor_parameters(lora, stage=0)
        factors += size.expert_factor_parameters(lora)
        model, checkpoint = model + element * factors, (element + state) * factors
    home = config.run.path
    existing = len(list(config.run.files.checkpoints.glob(ANY_STEP)))
    kept = max(1, config.checkpoint.keep + 1 - existing)  # a new one is written before one goes
    free = shutil.disk_usage(_existing(home)).free
    if free < model + kept * checkpoint:
        yield finding(
            "no-space" if free < model + checkpoint else "little-space",
            home=home,
            kept=kept,
            needed=(model + kept * checkpoint) / GIB,
            free=free / GIB,
        )


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
