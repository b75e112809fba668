"""The command `convert`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.commands.options import importing, require_path
from stable_opd_mcore.errors import UserError


def convert(
    source: Annotated[
        str,  # a Path would drop the ./ that marks a path and not a hub id
        typer.Argument(
            help="A Hugging Face directory or hub id, a Megatron checkpoint, or a PEFT adapter."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The directory to write; must not exist.")],
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks (torchrun).")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline stages (torchrun).")] = 1,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of the tokenizer; default: SOURCE.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit of a hub id; default: the newest.")
    ] = None,
) -> None:
    """Convert a model from Hugging Face to Megatron or back, depending on what SOURCE holds."""
    from stable_opd_mcore.host.atomic_files import require_new_directory
    from stable_opd_mcore.host.hub import MODEL_FILES, download, is_hub_id

    directory = Path(source)
    if not is_hub_id(source):
        require_path(directory, "a model's or a checkpoint's directory, or a hub id (owner/name)")
        if revision is not None:
            raise UserError(
                f"--revision {revision}: {source} is a path, and only a hub id has revisions; "
                "leave it out"
            )
    require_new_directory(target)
    if is_hub_id(source):
        directory, commit = download(source, "model", MODEL_FILES, revision)
        typer.echo(f"downloaded commit {commit}")
    with importing():
        from stable_opd_mcore.commands.convert.convert import convert as run_conversion

    typer.echo(f"{run_conversion(directory, target, tensor, pipeline, tokenizer)}: {target}")
