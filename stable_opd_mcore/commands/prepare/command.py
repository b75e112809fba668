"""The command `prepare`: its options."""

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
    seed: Annotated[int, typer.Option(help="Seed of the order and the split.")] = 0,
    problem: Annotated[str | None, typer.Option(help="rows: the problem's column.")] = None,
    answer: Annotated[str | None, typer.Option(help="rows: the answer's; '': none.")] = None,
    solution: Annotated[str | None, typer.Option(help="rows: the solution's; '': none.")] = None,
) -> None:
    """Make training sets without benchmark problems, as files for nodes without internet."""
    from stable_opd_mcore.commands.prepare.options import preparation_of
    from stable_opd_mcore.commands.prepare.prepare import prepare_data

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
