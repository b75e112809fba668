"""The `stable-opd` command.

A UserError (wrong settings, data, layout or servers) ends it with one message and exit code 2. Any
other exception is a defect of this project and keeps its traceback. Commands import what they run
after the arguments are parsed, so that `--help` is quick. Not here: what the commands do.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

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
TrainerNodes = Annotated[int, typer.Option(min=1, help="Trainer nodes.")]
GpusPerNode = Annotated[int, typer.Option(min=1)]
ServerNodes = Annotated[int, typer.Option(min=0, help="Nodes of SGLang servers.")]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Resume with other settings than the run was trained with."
        ),
    ] = False,
) -> None:
    """Train; resumes by itself when the run directory holds a checkpoint."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.atomic_files import naming_disk_errors
    from stable_opd_mcore.train.loop import train as run_training

    try:
        with naming_disk_errors(settings.run.path):
            run_training(settings, accept_changes=accept_changes)
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was saved since the newest checkpoint", err=True)
        raise typer.Exit(130) from None


@app.command()
def evaluate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Evaluate the student of a config on its evaluation.benchmarks, or on data.eval."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.train.evaluation import evaluate_config

    evaluate_config(settings, print_line=typer.echo)


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

    run_servers(settings, teacher=teacher, tell=typer.echo)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face directory or a Megatron checkpoint.")
    ],
    target: Annotated[Path, typer.Argument(help="The directory to write; must not exist.")],
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks (torchrun).")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline stages (torchrun).")] = 1,
) -> None:
    """Convert weights from Hugging Face to Megatron or back, depending on what SOURCE holds."""
    from stable_opd_mcore.train.convert import convert as run_conversion

    typer.echo(f"{run_conversion(source, target, tensor, pipeline)}: {target}")


@app.command()
def prepare(
    tokenizer: Annotated[str, typer.Argument(help="The student's model directory.")],
    directory: Annotated[Path, typer.Option(help="Where the files go.")] = Path("data"),
    openr1: Annotated[
        str, typer.Option(help="Hub id, directory or file of OpenR1-Math-220k's rows.")
    ] = "open-r1/OpenR1-Math-220k",
    benchmarks: Annotated[
        Path | None,
        typer.Option(help="Directory of <name>.jsonl or <name>.parquet; default: the hub."),
    ] = None,
) -> None:
    """Write the paper's training sets and benchmarks as files, for nodes without internet."""
    from stable_opd_mcore.data.chat import Tokenizer
    from stable_opd_mcore.evaluation.paper_data import write_paper_data

    write_paper_data(Tokenizer.load(tokenizer), directory, typer.echo, openr1, benchmarks)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories to compare.")],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page with the curves of one run or several."""
    from stable_opd_mcore.monitoring.report import write_report

    write_report(runs, output)
    typer.echo(f"wrote {output}")


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: TrainerNodes = 1,
    gpus_per_node: GpusPerNode = 8,
    server_nodes: ServerNodes = 0,
    gpu: Annotated[str, typer.Option(help="h200 or h100.")] = "h200",
    layouts: Annotated[bool, typer.Option("--layouts", help="Rank all valid layouts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Predict memory per GPU and seconds a step, without a GPU; code 1: memory does not fit."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.planning.plan import Cluster, layouts_table, make_plan, rank_layouts

    cluster = Cluster(nodes, gpus_per_node, server_nodes)
    if layouts:
        typer.echo(layouts_table(rank_layouts(settings, cluster, gpu)))
        return
    made = make_plan(settings, cluster, gpu)
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
) -> None:
    """Say who trains where and which SGLang server has which GPUs and whose prompts."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.planning.plan import Cluster, plan_topology

    derived = plan_topology(settings, Cluster(nodes, gpus_per_node, server_nodes), gpu)
    if as_json or as_shell:
        typer.echo(derived.as_json() if as_json else derived.as_shell())
    else:
        typer.echo("\n".join(derived.lines()))


@app.command()
def rehearse(
    configs: Annotated[list[str], typer.Argument(help="YAML files; settings to change.")],
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="Trainer nodes; give it once for each world.")
    ] = None,
    gpus_per_node: GpusPerNode = 8,
    server_nodes: ServerNodes = 0,
    gpu: Annotated[str, typer.Option(help="h200 or h100.")] = "h200",
) -> None:
    """Set up, train one step and publish in a world without GPUs; every stage of every world."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: tensors without memory are the CPU's
    from stable_opd_mcore.config.load import load_config
    from stable_opd_mcore.planning.plan import Cluster
    from stable_opd_mcore.rehearsal.worlds import rehearse_worlds

    overrides = [argument for argument in configs if "=" in argument]
    paths = [Path(argument) for argument in configs if "=" not in argument]
    settings = [load_config(path, overrides) for path in paths]
    clusters = [Cluster(n, gpus_per_node, server_nodes) for n in nodes or (1, 2, 16, 128)]
    if not rehearse_worlds(settings, clusters, gpu, typer.echo):
        raise typer.Exit(1)


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds of every arm.")] = 1,
    directory: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("runs/demo"),
) -> None:
    """Watch plain on-policy distillation collapse and Stable-OPD hold, on this machine's CPU."""
    from stable_opd_mcore.demo.run import run_demo

    run_demo(directory, seeds)


class _ToleratesClosedPipe(io.FileIO):
    """A standard stream that drops what is written after its reader has ended, as `head` does."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            return len(data)


def _ignore_closed_pipes() -> None:
    """A run continues when the reader of its standard streams ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, or replaced by the caller
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(_ToleratesClosedPipe(stream.fileno(), "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapped)


def main() -> None:
    """Run the command; a UserError becomes one message on stderr."""
    _ignore_closed_pipes()
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


if __name__ == "__main__":
    main()
