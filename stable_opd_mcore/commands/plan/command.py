"""The commands `plan` and `topology`: their options."""

from dataclasses import replace
from typing import Annotated

import typer

from stable_opd_mcore.commands.options import (
    ConfigPath,
    GpusPerNode,
    Overrides,
    ServerNodes,
    TrainerNodes,
)
from stable_opd_mcore.errors import UserError


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: TrainerNodes = 1,
    gpus_per_node: GpusPerNode = 8,
    server_nodes: ServerNodes = 0,
    gpu: Annotated[str, typer.Option(help="h200 or h100.")] = "h200",
    teacher_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Mean length of teacher.prompt; default: the student's prompt and 1,024.",
        ),
    ] = None,
    layouts: Annotated[bool, typer.Option("--layouts", help="List all valid layouts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Predict memory per GPU, without a GPU; code 1: memory does not fit."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.commands.plan.plan import (
        Cluster,
        layouts_json,
        layouts_table,
        make_plan,
        rank_layouts,
    )
    from stable_opd_mcore.commands.plan.planned_run import default_work

    if teacher_prompt_tokens and (settings.teacher is None or settings.teacher.prompt is None):
        raise UserError(
            "--teacher-prompt-tokens without a teacher.prompt: set one, or leave this option out"
        )
    cluster = Cluster(nodes, gpus_per_node, server_nodes)
    work = replace(default_work(settings), teacher_prompt_tokens=teacher_prompt_tokens)
    if layouts:
        plans = rank_layouts(settings, cluster, gpu, work)
        typer.echo(layouts_json(plans) if as_json else layouts_table(plans))
        return
    made = make_plan(settings, cluster, gpu, work)
    typer.echo(made.as_json() if as_json else made.table())
    if not made.memory.fits:
        raise typer.Exit(1)


def topology(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: TrainerNodes = 1,
    gpus_per_node: GpusPerNode = 8,
    server_nodes: ServerNodes = 0,
    gpu: Annotated[str, typer.Option(help="h200, h100, or cpu for a test.")] = "h200",
    as_shell: Annotated[bool, typer.Option("--shell", help="Assignments for a script.")] = False,
    hosts: Annotated[
        str, typer.Option(help="Names of the nodes with commas, the trainer's first.")
    ] = "",
) -> None:
    """Show which ranks train where, and each SGLang server's GPUs and prompts."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.commands.plan import topology_text
    from stable_opd_mcore.commands.plan.planned_run import plan_topology
    from stable_opd_mcore.placement.hardware import Cluster

    derived = plan_topology(settings, Cluster(nodes, gpus_per_node, server_nodes), gpu)
    if as_shell:
        typer.echo(topology_text.as_shell(derived))
    else:
        places = topology_text.places(derived, hosts.split(",") if hosts else ())
        typer.echo("\n".join([*topology_text.lines(derived), *places]))
