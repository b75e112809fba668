"""The run directory's resolved configs: every config that a run was started with is kept.

config.resolved.yaml holds the settings of the newest start; those of earlier starts that differ are
kept as config.resolved.001.yaml and so on.
"""

from contextlib import ExitStack
from pathlib import Path

from stable_opd_mcore.config.load import config_yaml
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.host.atomic_files import naming_disk_errors, write_atomically
from stable_opd_mcore.host.run_lock import RunLock
from stable_opd_mcore.inputs.hashes import write_inputs
from stable_opd_mcore.train.oversight.signals import clear_outcome


def take_directory(stack: ExitStack, locked: Path, home: Path) -> None:
    """Lock a directory until the stack ends, and remove the outcome of an earlier start in `home`.

    Raises:
        UserError: another process has it, or it cannot be written.
    """
    with naming_disk_errors(home):
        stack.enter_context(RunLock(locked))
        clear_outcome(home)


def keep_resolved(config: Config) -> None:
    """Write config.resolved.yaml and inputs.json (inputs/hashes.py)."""
    path = config.run.files.resolved
    text = config_yaml(config)
    before = path.read_bytes() if path.is_file() else text
    if before != text:  # first, so that a kill in between loses neither
        earlier = sorted(path.parent.glob("config.resolved.[0-9]*.yaml"))
        number = int(earlier[-1].name.split(".")[2]) + 1 if earlier else 1
        write_atomically(path.with_name(f"config.resolved.{number:03d}.yaml"), before)
    write_atomically(path, text)
    write_inputs(config)
