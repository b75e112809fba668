"""The command `report`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.errors import UserError


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories to compare, or folders of them.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The HTML file to write; default: report.html.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Serve the page, again as the runs grow.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Of --follow, on 127.0.0.1; default: 8642; 0: any."),
    ] = None,
) -> None:
    """Write one self-contained HTML page with the curves of one run or several, or serve it."""
    if follow and output is not None:
        raise UserError(f"--output {output} with --follow, which writes no file; leave one out")
    if port is not None and not follow:
        raise UserError(f"--port {port} without --follow: only that has a server; leave it out")
    if follow:
        from stable_opd_mcore.commands.report.follow import follow as follow_runs

        follow_runs(runs, 8642 if port is None else port, typer.echo)
        return
    from stable_opd_mcore.commands.report.report import write_report

    typer.echo(f"wrote {write_report(runs, output or Path('report.html'))}")
