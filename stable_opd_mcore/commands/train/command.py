"""The command `train`: its options."""

from typing import Annotated

import typer

from stable_opd_mcore.commands.options import (
    AcceptChanges,
    ConfigPath,
    Overrides,
    importing,
    interruptible,
)


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    accept_changes: AcceptChanges = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only warnings, errors and why the run stopped.")
    ] = False,
) -> None:
    """Train; resumes by itself when the run directory holds a checkpoint."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    with importing():
        from stable_opd_mcore.commands.train.train import train as run_training
        from stable_opd_mcore.host.atomic_files import naming_disk_errors
        from stable_opd_mcore.inputs.downloads import with_downloads

    settings = with_downloads(settings)
    said = "nothing was saved since the newest checkpoint"
    with interruptible(said), naming_disk_errors(settings.run.path):
        run_training(settings, show_progress=not quiet, accept_changes=accept_changes)
