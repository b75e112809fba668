"""The command `rehearse`: its options."""

import os
from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.commands.options import GpusPerNode, ServerNodes, importing, is_path


def rehearse(
    configs: Annotated[list[str], typer.Argument(help="YAML files; settings to change.")],
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="Trainer nodes; give it once for each world.")
    ] = None,
    gpus_per_node: GpusPerNode = 8,
    server_nodes: ServerNodes = 0,
    gpu: Annotated[str, typer.Option(help="h200 or h100.")] = "h200",
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layers of each model chunk; default: all, and two of a model with experts.",
        ),
    ] = None,
) -> None:
    """Set up, train one step and publish in a world without GPUs; every stage of every world."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: tensors without memory are the CPU's
    from stable_opd_mcore.config.load import load_config

    overrides = [argument for argument in configs if not is_path(argument)]
    paths = [Path(argument) for argument in configs if is_path(argument)]
    settings = [load_config(path, overrides) for path in paths]
    with importing():
        from stable_opd_mcore.commands.rehearse.worlds import rehearse_worlds
        from stable_opd_mcore.placement.hardware import Cluster

    clusters = [Cluster(n, gpus_per_node, server_nodes) for n in nodes or (1, 2, 16, 128)]
    if not rehearse_worlds(settings, clusters, gpu, typer.echo, layers):
        raise typer.Exit(1)
