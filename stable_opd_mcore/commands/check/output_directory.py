"""The run directory: locked by another run, trained with other settings, not writable, too small.

Not here: the lock itself (host/run_lock.py), which settings differ (inputs/changed_settings.py).
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.config.cold_start import after_cold_start
from stable_opd_mcore.config.guard_settings import (
    HEALTHY_AFTER,
    MOST_KEPT,
    MOST_STEPS_BETWEEN_SAVES,
)
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
from stable_opd_mcore.inputs.changed_settings import settings_changes
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.placement.hardware import GIB
from stable_opd_mcore.placement.layout import Layout
from stable_opd_mcore.placement.model_size import ADAM_BYTES, WEIGHT_BYTES, ModelSize


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
        factors += size.expert_factor_parameters(lora, stage=0)
        model, checkpoint = model + element * factors, (element + state) * factors
    home = config.run.path
    existing = len(list(config.run.files.checkpoints.glob(ANY_STEP)))
    most = config.checkpoint.keep + (MOST_KEPT if config.guard.acts else 0)
    kept = max(1, most + 1 - existing)  # a new one is written before one goes
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
