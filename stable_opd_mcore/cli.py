"""The `stable-opd` command.

A UserError (wrong settings, data, layout or servers) ends it with one message and exit code 2. Any
other exception is a defect of this project and keeps its traceback. Commands import what they run
after the arguments are parsed, so that `--help` is quick.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.cli_files import interruptible, prepare, report, score
from stable_opd_mcore.errors import UserError

app = typer.Typer(
    help="Stable on-policy distillation of large language models on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(help="A YAML file; configs/ holds examples.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, e.g. train.steps=10 kl.beta=0.01")
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes", help="Resume with settings that differ from those of the run."
    ),
]
TrainerNodes = Annotated[int, typer.Option(min=1, help="Trainer nodes.")]
GpusPerNode = Annotated[int, typer.Option(min=1)]
ServerNodes = Annotated[int, typer.Option(min=0, help="Nodes of SGLang servers.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stable-opd {version('stable-opd-mcore')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Stable on-policy distillation of large language models on Megatron-Core."""


@contextmanager
def _importing() -> Iterator[None]:
    """Import without garbage collection: it finds nothing, and takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what was imported stays
        gc.enable()


def _require_path(path: Path, wanted: str) -> None:
    """Refuse a path that does not exist, before anything heavy is imported."""
    if not path.exists():
        raise UserError(f"{path}: no such file or directory; give {wanted}")


def _is_path(word: str) -> bool:
    """Whether a word is not an override: it has no "=", or names an existing path (lr=1e-6)."""
    return "=" not in word or os.path.exists(word)  # Path.exists raises for a long override


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    accept_changes: AcceptChanges = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only warnings, errors and why the run stopped.")
    ] = False,
) -> None:
    """Train; resumes by itself when the run directory holds a checkpoint."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    with _importing():
        from stable_opd_mcore.host.atomic_files import naming_disk_errors
        from stable_opd_mcore.run_inputs import with_downloads
        from stable_opd_mcore.train.loop import train as run_training

    settings = with_downloads(settings)
    said = "nothing was saved since the newest checkpoint"
    with interruptible(said), naming_disk_errors(settings.run.path):
        run_training(settings, show_progress=not quiet, accept_changes=accept_changes)


@app.command()
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
    from stable_opd_mcore.checks.checklist import check_file, check_pair
    from stable_opd_mcore.planning.hardware import Cluster, device_named

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


@app.command()
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            help="A run's directory (its trained model), a Hugging Face directory, a Megatron "
            "checkpoint, a PEFT adapter, or a config (the trained model of its run)."
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="More targets, e.g. the runs of other seeds: then a table with means. "
            "Settings to change, e.g. evaluation.temperature=0"
        ),
    ] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(
            help="Names with commas: aime24, aime25, amc, math500, minerva, olympiadbench; or all."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings for a model of no run; default: the paper's evaluation."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only the first N problems of each set.")
    ] = None,
) -> None:
    """Evaluate a model: avg@k and pass@k with intervals, truncation, repetition, as tables."""
    targets = [target, *(Path(word) for word in more or [] if _is_path(word))]
    for each in targets:
        _require_path(each, "a config, a run's directory, a model's or a checkpoint's")
    if config is not None:
        _require_path(config, "a config; configs/ holds examples")
    with _importing():
        from stable_opd_mcore.train.evaluated_model import evaluation_configs, named_benchmarks

    named = named_benchmarks(benchmarks) if benchmarks is not None else []
    overrides = [*named, *(word for word in more or [] if not _is_path(word))]
    configs = evaluation_configs(targets, config, overrides)
    from stable_opd_mcore.train.evaluation import evaluate_config

    done: list[Path] = []
    with interruptible("the same command continues after the last stored part"):
        for settings in configs:
            others = done if settings is configs[-1] else []
            done.append(
                evaluate_config(
                    settings, typer.echo, show_progress=True, limit=limit, others=others
                )
            )


@app.command()
def serve(
    config: ConfigPath,
    overrides: Overrides = None,
    teacher: Annotated[
        bool, typer.Option("--teacher", help="Serve teacher.path instead of the student.")
    ] = False,
) -> None:
    """Start the SGLang servers of rollout.sglang for other runs; they end with this command."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.rollout.sglang.serve import serve as run_servers
    from stable_opd_mcore.run_inputs import with_downloads

    run_servers(with_downloads(settings), teacher=teacher, say=typer.echo)


@app.command()
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
        _require_path(directory, "a model's or a checkpoint's directory, or a hub id (owner/name)")
        if revision is not None:
            raise UserError(
                f"--revision {revision}: {source} is a path, and only a hub id has revisions; "
                "leave it out"
            )
    require_new_directory(target)
    if is_hub_id(source):
        directory, commit = download(source, "model", MODEL_FILES, revision)
        typer.echo(f"downloaded commit {commit}")
    with _importing():
        from stable_opd_mcore.train.convert import convert as run_conversion

    typer.echo(f"{run_conversion(directory, target, tensor, pipeline, tokenizer)}: {target}")


for command in (score, prepare, report):
    app.command()(command)


@app.command()
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
    from stable_opd_mcore.planning.plan import (
        Cluster,
        layouts_json,
        layouts_table,
        make_plan,
        rank_layouts,
    )
    from stable_opd_mcore.planning.planned_run import default_work

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


@app.command()
def topology(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: TrainerNodes = 1,
    gpus_per_node: GpusPerNode = 8,
    server_nodes: ServerNodes = 0,
    gpu: Annotated[str, typer.Option(help="h200, h100, or cpu for a test.")] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    as_shell: Annotated[bool, typer.Option("--shell", help="Assignments for a script.")] = False,
    hosts: Annotated[
        str, typer.Option(help="Names of the nodes with commas, the trainer's first.")
    ] = "",
) -> None:
    """Show which ranks train where, and each SGLang server's GPUs and prompts."""
    from stable_opd_mcore.config.load import load_config

    if as_json and as_shell:
        raise UserError("--json and --shell are two forms of the output: leave one out")
    settings = load_config(config, overrides or [])
    from stable_opd_mcore.planning.hardware import Cluster
    from stable_opd_mcore.planning.planned_run import plan_topology

    derived = plan_topology(settings, Cluster(nodes, gpus_per_node, server_nodes), gpu)
    if as_json or as_shell:
        typer.echo(derived.as_json() if as_json else derived.as_shell())
    else:
        places = derived.places(hosts.split(",") if hosts else ())
        typer.echo("\n".join([*derived.lines(), *places]))


@app.command()
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

    overrides = [argument for argument in configs if not _is_path(argument)]
    paths = [Path(argument) for argument in configs if _is_path(argument)]
    settings = [load_config(path, overrides) for path in paths]
    with _importing():
        from stable_opd_mcore.planning.hardware import Cluster
        from stable_opd_mcore.rehearsal.worlds import rehearse_worlds

    clusters = [Cluster(n, gpus_per_node, server_nodes) for n in nodes or (1, 2, 16, 128)]
    if not rehearse_worlds(settings, clusters, gpu, typer.echo, layers):
        raise typer.Exit(1)


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 1,
    directory: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("runs/demo"),
    agents: Annotated[bool, typer.Option("--agents", help="With an environment, too.")] = False,
) -> None:
    """Watch plain on-policy distillation collapse and Stable-OPD hold, on this machine's CPU."""
    from stable_opd_mcore.demo.runner import run_demo

    run_demo(directory, seeds, agents)


def main() -> None:
    """Run the command; a UserError becomes one message on stderr."""
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # permissions, a full disk, a directory where a file should be
        path = error.filename2 or error.filename
        if path is None:
            raise
        typer.echo(f"error: {path}: {error.strerror}", err=True)
        sys.exit(2)
