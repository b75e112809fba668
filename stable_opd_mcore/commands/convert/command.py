"""The command `convert`: its options."""

import os
from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.commands.options import importing


def convert(
    source: Annotated[
        str,  # a Path would drop the ./ that marks a path and not a hub id
        typer.Argument(
            help="A Hugging Face directory or hub id, a Megatron checkpoint, or a PEFT adapter."
        ),
    ],
    target: Annotated[
        Path | None,
        typer.Argument(
            help="The directory to write; must not exist. With --push-to-hub: optional."
        ),
    ] = None,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks (torchrun).")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline stages (torchrun).")] = 1,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of the tokenizer; default: SOURCE.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit of a hub id; default: the newest.")
    ] = None,
    push_to_hub: Annotated[str | None, typer.Option(help="OWNER/NAME: upload it too.")] = None,
    report_url: Annotated[str | None, typer.Option(help="Of a report, for the card.")] = None,
) -> None:
    """Convert a model from Hugging Face to Megatron or back, depending on what SOURCE holds."""
    from stable_opd_mcore.commands.convert.source import model_directory

    directory = model_directory(source, revision, target, push_to_hub, typer.echo)
    with importing():
        from stable_opd_mcore.commands.convert.convert import convert as run_conversion
        from stable_opd_mcore.commands.convert.model_card import Upload

    upload = Upload.of(directory, target, push_to_hub, report_url)
    if target is not None:
        typer.echo(f"{run_conversion(directory, target, tensor, pipeline, tokenizer)}: {target}")
    if upload is not None and int(os.environ.get("RANK", "0")) == 0:
        typer.echo(upload.run())
