"""The commands `report` and `watch`: their options."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories to compare, or folders of them.")
    ],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page with the curves of one run or several."""
    from stable_opd_mcore.commands.report.report import write_report

    write_report(runs, output)
    typer.echo(f"wrote {output}")


def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run directories, or folders of them; they need not exist yet."),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any free one.")
    ] = 8642,
) -> None:
    """Show runs in a browser while they train: figures, events and rollouts to read."""
    from stable_opd_mcore.commands.report.watch import watch as watch_runs

    watch_runs(runs, port, typer.echo)
