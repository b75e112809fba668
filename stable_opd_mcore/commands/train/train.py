"""What the command `train` does: check the run, train it, and write its report."""

import sys
from pathlib import Path

from stable_opd_mcore.commands.check.checklist import check_run, refuse_errors
from stable_opd_mcore.commands.report.report import write_report
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.parallel.world import on_first_rank
from stable_opd_mcore.train.loop import train_run
from stable_opd_mcore.train.setup import place_of, start_configured_world


def train(config: Config, show_progress: bool = True, accept_changes: bool = False) -> Path:
    """Check a run before any model is loaded, then train it; return the run directory.

    Args:
        accept_changes: resume with settings that differ from those of the checkpoints.

    Raises:
        Stopped: a signal stopped the run between two steps; a checkpoint is saved.
        UserError: the checks find an error, such as another run in the directory or settings that
            differ from the checkpoints' and are not accepted.
    """
    world = start_configured_world(config)
    inputs = RunInputs(config, place_of(world), accept_changes)
    on_first_rank(world, lambda: _check(inputs, show_progress))
    return train_run(inputs, world, _report, show_progress)


def _check(inputs: RunInputs, show: bool) -> None:
    """Print what `stable-opd check` finds, and raise its errors."""
    report = check_run(inputs)
    if show:
        print(report.without_errors(), file=sys.stderr, flush=True)
    refuse_errors(report)


def _report(files: RunDirectory) -> None:
    write_report([files.path], files.report)
