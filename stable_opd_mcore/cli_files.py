"""The commands over files, which need no model: `score`, `prepare` and `report`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.errors import UserError


@contextmanager
def interruptible(said: str) -> Iterator[None]:
    """After Ctrl-C inside the block, print `said` and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {said}", err=True)
        raise typer.Exit(130) from None


def score(
    files: Annotated[
        list[Path], typer.Argument(help="JSON Lines, one response a row; - is standard input.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Directory of verdicts and summary; default: FILE.score")
    ] = None,
    response: Annotated[
        str | None, typer.Option(help="Column of the response; default: usual names.")
    ] = None,
    gold: Annotated[str | None, typer.Option(help="Final answers to grade against.")] = None,
    row_id: Annotated[str | None, typer.Option("--id", help="Names of rows.")] = None,
    finish: Annotated[str | None, typer.Option(help="Why a response ended.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Token ids of the response.")] = None,
    group: Annotated[
        str | None, typer.Option(help="A group for each value of this column.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model directory, to measure tokens of rows without ids.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Length budget, for rows without finish reason.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=1, help="Characters whose compression is the repetition rate.")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Compression above which a tail repeats.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to grade one response.")] = 10.0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Grading processes; default: one a core.")
    ] = None,
) -> None:
    """Grade and measure the responses of files: accuracy, truncation, repetition, lengths."""
    from stable_opd_mcore.evaluation.grading_files import (
        FileGradingSettings,
        default_output,
        grade_files,
    )
    from stable_opd_mcore.evaluation.grading_rows import Columns
    from stable_opd_mcore.evaluation.grading_summary import table

    columns = Columns(response, gold, row_id, finish, tokens, group)
    settings = FileGradingSettings(columns, tokenizer, limit, tail, ratio, timeout, workers)
    directory = output or default_output(files)
    with interruptible("nothing was written"):
        summary = grade_files(files, directory, settings)
    typer.echo(table(summary))
    typer.echo(f"wrote {directory}")


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
    seed: Annotated[int, typer.Option(help="Seed of the order and the split.")] = 0,
    problem: Annotated[str | None, typer.Option(help="rows: the problem's column.")] = None,
    answer: Annotated[str | None, typer.Option(help="rows: the answer's; '': none.")] = None,
    solution: Annotated[str | None, typer.Option(help="rows: the solution's; '': none.")] = None,
    processes: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Make training sets without benchmark problems, as files for nodes without internet."""
    from stable_opd_mcore.preparation.options import preparation_of
    from stable_opd_mcore.preparation.prepare import prepare_data

    if processes is not None:
        typer.echo("--processes has no effect any more: all cores tokenize; leave it out")
    columns = {"problem": problem, "answer": answer, "solution": solution}
    preparation = preparation_of(
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
        columns={role: name for role, name in columns.items() if name is not None},
    )
    prepare_data(preparation, typer.echo)


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
        from stable_opd_mcore.monitoring.follow import follow as follow_runs

        follow_runs(runs, 8642 if port is None else port, typer.echo)
        return
    from stable_opd_mcore.monitoring.report import write_report

    typer.echo(f"wrote {write_report(runs, output or Path('report.html'))}")
