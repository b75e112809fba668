"""The command `check`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.commands.options import (
    AcceptChanges,
    GpusPerNode,
    Overrides,
    ServerNodes,
    TrainerNodes,
)
from stable_opd_mcore.errors import UserError


def check(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file; or give --student and --teacher.")
    ] = None,
    overrides: Overrides = None,
    student: Annotated[
        str | None, typer.Option(help="A model directory, to check a pair without a config.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="The model directory of its teacher.")] = None,
    nodes: TrainerNodes = 1,
    gpus_per_node: GpusPerNode = 8,
    server_nodes: ServerNodes = 0,
    gpu: Annotated[
        str | None,
        typer.Option(help="h200, h100 or cpu; default: h200, and cpu with train.precision=fp32."),
    ] = None,
    accept_changes: AcceptChanges = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Report what does not fit together in a pair, config or run directory; code 1: errors."""
    from stable_opd_mcore.commands.check.checklist import check_file, check_pair
    from stable_opd_mcore.placement.hardware import Cluster, device_named

    if config is not None and student is None and teacher is None:
        if gpu not in (None, "cpu"):
            device_named(gpu)  # refuses an unknown name
        cluster = Cluster(nodes, gpus_per_node, server_nodes)
        report = check_file(config, overrides or [], cluster, gpu, accept_changes)
    elif config is None and student is not None and teacher is not None:
        report = check_pair(student, teacher)
    else:
        raise UserError(
            "neither one config nor one pair of models is given; give a config, or --student DIR "
            "and --teacher DIR"
        )
    typer.echo(report.as_json() if as_json else report.text())
    if report.errors:
        raise typer.Exit(1)
