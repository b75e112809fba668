"""The run directory's resolved configs: changed settings are refused, and every config is kept.

config.resolved.yaml holds the settings of the newest start; those of earlier starts that differ are
kept as config.resolved.001.yaml and so on. Not here: the lock (run_lock.py), checkpoints, metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.config.changes import changes, read_settings
from stable_opd_mcore.config.load import config_yaml
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError, UserError
from stable_opd_mcore.parallel.world import World, broadcast_object

CHECKPOINTS = "checkpoints"
RESOLVED = "config.resolved.yaml"

Result = TypeVar("Result")


def on_first_rank(world: World, function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0 only; every rank returns its result or raises its UserError."""
    outcome: Any = None
    if world.rank == 0:
        try:
            outcome = function()
        except UserError as error:
            outcome = error
    outcome = broadcast_object(outcome)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def settings_changes(config: Config, accepted: bool) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those with which the run directory's checkpoints were trained.

    Empty without checkpoints: then the run starts anew.

    Raises:
        ConfigError: there are some, and they are not `accepted`.
    """
    directory = config.run.path
    stored = directory / RESOLVED
    if not stored.is_file() or not any((directory / CHECKPOINTS).glob("step_*")):
        return {}
    differences = changes(read_settings(stored), config)
    if differences and not accepted:
        lines = "\n".join(f"  {key}: {old} -> {new}" for key, (old, new) in differences.items())
        raise ConfigError(
            f"{directory} was trained with other settings ({stored}):\n{lines}\n"
            "Set them back, start a new run with another run.name, or resume with the new "
            "settings: --accept-changes"
        )
    return differences


def keep_resolved(config: Config) -> None:
    """Write config.resolved.yaml; one with other contents is kept under the next number."""
    path = config.run.path / RESOLVED
    text = config_yaml(config)
    before = path.read_bytes() if path.is_file() else text
    if before != text:  # first, so that a kill in between loses neither
        earlier = sorted(path.parent.glob("config.resolved.[0-9]*.yaml"))
        number = int(earlier[-1].name.split(".")[2]) + 1 if earlier else 1
        write_atomically(path.with_name(f"config.resolved.{number:03d}.yaml"), before)
    write_atomically(path, text)
