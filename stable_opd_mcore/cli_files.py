"""The commands that need no model: `prepare`, `report` and `watch`.

Not here: the other commands, and how an error ends a command (cli.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def prepare(
    student: Annotated[
        str, typer.Argument(help="The student's model directory or hub id: its tokenizer.")
    ],
    recipe: Annotated[
        str, typer.Option(help="openr1, openr1-46k-8192, gsm8k, or rows: any file.")
    ] = "openr1",
    source: Annotated[
        str | None,
        typer.Option(help="A folder or file of parquet or JSON Lines; default: the hub."),
    ] = None,
    directory: Annotated[Path, typer.Option(help="Where the files go.")] = Path("data"),
    benchmarks: Annotated[
        Path | None,
        typer.Option(help="Folder of <name>.jsonl or <name>.parquet; default: the hub."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit of the data set on the hub; default: the newest.")
    ] = None,
    student_revision: Annotated[
        str | None, typer.Option(help="Commit of a student on the hub; default: the newest.")
    ] = None,
    sft_rows: Annotated[
        int, typer.Option(min=1, help="openr1: supervised rows; the others are OPD's prompts.")
    ] = 33_000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest solution.")] = 8192,
    seed: Annotated[int, typer.Option(help="Of the order and the split.")] = 0,
    processes: Annotated[
        int, typer.Option(min=0, help="0: one for each core of this process.")
    ] = 0,
    problem: Annotated[str | None, typer.Option(help="rows: the problem's column.")] = None,
    answer: Annotated[str | None, typer.Option(help="rows: the answer's; '': none.")] = None,
    solution: Annotated[str | None, typer.Option(help="rows: the solution's; '': none.")] = None,
) -> None:
    """Make training sets without benchmark problems, as files for nodes without internet."""
    from stable_opd_mcore.preparation.job import job_of
    from stable_opd_mcore.preparation.prepare import prepare_data

    columns = {"problem": problem, "answer": answer, "solution": solution}
    job = job_of(
        student=student,
        student_revision=student_revision,
        recipe=recipe,
        source=source,
        directory=directory,
        benchmarks=benchmarks,
        revision=revision,
        sft_rows=sft_rows,
        max_tokens=max_tokens,
        seed=seed,
        processes=processes,
        columns={role: name for role, name in columns.items() if name is not None},
    )
    prepare_data(job, typer.echo)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories to compare, or folders of them.")
    ],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page with the curves of one run or several."""
    from stable_opd_mcore.monitoring.report import write_report

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
    from stable_opd_mcore.monitoring.watch import watch as watch_runs

    watch_runs(runs, port, typer.echo)
