"""The command `score`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.commands.options import interruptible


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
    from stable_opd_mcore.commands.score.grading_files import (
        FileGradingSettings,
        default_output,
        grade_files,
    )
    from stable_opd_mcore.commands.score.grading_rows import Columns
    from stable_opd_mcore.commands.score.grading_summary import table

    columns = Columns(response, gold, row_id, finish, tokens, group)
    settings = FileGradingSettings(columns, tokenizer, limit, tail, ratio, timeout, workers)
    directory = output or default_output(files)
    with interruptible("nothing was written"):
        summary = grade_files(files, directory, settings)
    typer.echo(table(summary))
    typer.echo(f"wrote {directory}")
