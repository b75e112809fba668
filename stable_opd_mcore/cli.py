"""The `stable-opd` command.

A UserError (wrong settings, data, layout or servers) ends it with one message and exit code 2. Any
other exception is a defect of this project and keeps its traceback. Commands import what they run
after the arguments are parsed, so that `--help` is quick.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from stable_opd_mcore.commands.check.command import check
from stable_opd_mcore.commands.convert.command import convert
from stable_opd_mcore.commands.demo.command import demo
from stable_opd_mcore.commands.evaluate.command import evaluate
from stable_opd_mcore.commands.plan.command import plan, topology
from stable_opd_mcore.commands.prepare.command import prepare
from stable_opd_mcore.commands.rehearse.command import rehearse
from stable_opd_mcore.commands.report.command import report
from stable_opd_mcore.commands.score.command import score
from stable_opd_mcore.commands.serve.command import serve
from stable_opd_mcore.commands.train.command import train
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.torch_release import refuse_old_torch

COMMANDS = (
    train,
    check,
    evaluate,
    serve,
    convert,
    score,
    prepare,
    report,
    plan,
    topology,
    rehearse,
    demo,
)
app = typer.Typer(
    help="Stable on-policy distillation of large language models on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stable-opd {version('stable-opd-mcore')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Stable on-policy distillation of large language models on Megatron-Core."""


def main() -> None:
    """Run the command; a UserError becomes one message on stderr."""
    try:
        refuse_old_torch()
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # permissions, a full disk, a directory where a file should be
        path = error.filename2 or error.filename
        if path is None:
            raise
        typer.echo(f"error: {path}: {error.strerror}", err=True)
        sys.exit(2)
