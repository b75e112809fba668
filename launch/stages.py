"""Stages of an experiment (a batch script with its arguments each), started by NeMo-Run.

On Slurm, NeMo-Run writes and submits the job. The job then replaces itself with one of our batch
scripts, so resources, checks, checkpoints before the limit, requeue and verdict are those of
`sbatch slurm/...`. On this machine a stage is launch/torchrun.sh.
Not here: which stages make an experiment (pipeline.py, sweep.py).
This file has no `from __future__ import annotations`, because NeMo-Run reads the annotations.
"""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nemo_run as run  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]
SUCCEEDED, FAILED, CANCELLED = "SUCCEEDED", "FAILED", "CANCELLED"
_experiment_ended = False  # stays False when NeMo-Run prints an error and returns


@dataclass(frozen=True)
class Stage:
    """`sbatch slurm/<script>.sh <arguments>`, started when the stages in `after` have succeeded."""

    name: str
    script: str  # sft, stable_opd_7b, evaluate, ...
    subcommand: str  # the one of `stable-opd` that the script runs
    arguments: Sequence[str]
    after: Sequence[str] = ()  # names of earlier stages


@run.cli.factory
@run.autoconvert
def slurm() -> run.SlurmExecutor:
    """Submit from a login node; `run.executor.partition=h200` sets any of NeMo-Run's fields.

    A field that is 0 or empty takes the value of the stage's #SBATCH lines. NEMORUN_HOME must be on
    the shared file system.
    """
    return run.SlurmExecutor(
        account=None,  # type: ignore  # the user's default account
        nodes=0,
        time="",
        ntasks_per_node=1,
        tunnel=run.LocalTunnel(job_dir=""),  # sbatch does not find the job in another directory
        packager=run.Packager(),  # copies no code; the job uses the shared checkout
    )


@run.cli.factory
@run.autoconvert
def local() -> run.LocalExecutor:
    """Run on this machine, the stages in sequence."""
    return run.LocalExecutor(packager=run.Packager())


@dataclass(kw_only=True)
class BatchScript(run.Plugin):
    """Replaces the body of the Slurm job with one of our batch scripts, and takes the resources and
    the early signal from its #SBATCH lines.

    The early signal would kill NeMo-Run's own job, and a trap set there runs only after its srun.
    """

    stage: Stage

    def setup(self, task, executor: run.Executor) -> None:
        assert isinstance(executor, run.SlurmExecutor)
        script = ROOT / "slurm" / f"{self.stage.script}.sh"
        option = r"^#SBATCH --([\w-]+)(?:=(\S+))?"  # a flag has no value
        lines: dict[str, str] = dict(re.findall(option, script.read_text(), re.MULTILINE))
        executor.nodes = executor.nodes or int(lines["nodes"])
        if executor.gpus_per_node is None and "gpus-per-node" in lines:
            executor.gpus_per_node = int(lines["gpus-per-node"])
        executor.time = executor.time or lines["time"]
        executor.mem = executor.mem or lines.get("mem")
        executor.exclusive = executor.exclusive or "exclusive" in lines or None
        executor.signal = executor.signal or lines["signal"]
        experiment = self.experiment_id.rpartition("_")[0]  # the id is <name>_<time>
        executor.job_name_prefix = executor.job_name_prefix or f"{experiment}."
        # without this option a stage whose parent failed stays in the queue for ever
        more = executor.additional_parameters or {}
        executor.additional_parameters = {"kill_on_invalid_dep": "yes", **more}
        command = shlex.join(["bash", str(script), *self.stage.arguments])
        executor.setup_lines = "\n".join(
            (
                # the file that `nemo experiment logs` reads; all attempts append to it
                "output=$(scontrol -o show job $SLURM_JOB_ID |",
                "  sed -nE 's/.* StdOut=(\\S+).*/\\1/p')",
                'log=$(dirname "$output")/$(basename "${output/sbatch_/log-}" .out)_0.out',
                f'exec env ROOT={shlex.quote(str(ROOT))} {command} >>"$log" 2>&1',
            )
        )


def run_stages(context: run.cli.RunContext, name: str, stages: Sequence[Stage]) -> None:
    """Run the experiment and print the final state of each stage. Exit with code 1 unless all
    succeeded; NeMo-Run itself always returns 0.

    Raises:
        ValueError: there is no executor, or as `refuse_unusable`.
    """
    global _experiment_ended
    if context.executor is None:
        raise ValueError("no executor is given: add run.executor=slurm or run.executor=local")
    refuse_unusable(stages)
    with run.Experiment(name, executor=context.executor) as experiment:
        for stage in stages:
            add(experiment, stage, context.executor)
        context.launch(experiment)
    _experiment_ended = True
    if context.dryrun or context.detach:
        return
    if isinstance(context.executor, run.SlurmExecutor):
        jobs = experiment.status(return_dict=True) or {}
        states = {job: str(status["status"]) for job, status in jobs.items()}
    else:
        states = {stage.name: local_state(experiment, stage) for stage in stages}
    for stage_name, state in states.items():
        print(f"{stage_name}: {state}")
    if any(state != SUCCEEDED for state in states.values()):
        sys.exit(1)


def refuse_unusable(stages: Sequence[Stage]) -> None:
    """Raise a ValueError if a stage's script or config is missing, or it has a setting twice."""
    for stage in stages:
        configs = [argument for argument in stage.arguments if argument.endswith(".yaml")]
        for file in (f"slurm/{stage.script}.sh", *configs):
            if not (ROOT / file).is_file():
                raise ValueError(
                    f"{stage.name}: {ROOT / file} does not exist; name a config, or another size"
                )
        keys = [argument.partition("=")[0] for argument in stage.arguments if "=" in argument]
        if repeated := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"{stage.name}: {', '.join(repeated)} given twice; give it once")


def add(experiment: run.Experiment, stage: Stage, executor: run.Executor) -> None:
    """Add a stage. On this machine it also depends on the stage added before it."""
    if isinstance(executor, run.SlurmExecutor):
        experiment.add(
            run.Script(path=str(ROOT / "slurm" / f"{stage.script}.sh"), args=[*stage.arguments]),
            executor=executor,
            name=stage.name,
            dependencies=[*stage.after],
            plugins=[BatchScript(stage=stage)],
        )
        # the plugin has run; `nemo experiment` could not import one that is stored with the job
        experiment.jobs[-1].plugins = None
        return
    # NeMo-Run on one machine keeps the order, but also starts a stage whose parent failed
    executor = executor.clone()
    executor.env_vars |= {
        "DONE": str(success_file(experiment, stage.name)),
        "AFTER": ":".join(str(success_file(experiment, parent)) for parent in stage.after),
    }
    experiment.add(
        run.Script(
            path=str(ROOT / "launch" / "torchrun.sh"), args=[stage.subcommand, *stage.arguments]
        ),
        executor=executor,
        name=stage.name,
        dependencies=[job.id for job in experiment.jobs[-1:]],
    )


def success_file(experiment: run.Experiment, stage: str) -> Path:
    """launch/torchrun.sh creates this file when a stage of a local experiment has succeeded."""
    return Path(experiment._exp_dir) / f"{stage}.succeeded"


def local_state(experiment: run.Experiment, stage: Stage) -> str:
    if success_file(experiment, stage.name).exists():
        return SUCCEEDED
    started = all(success_file(experiment, parent).exists() for parent in stage.after)
    return FAILED if started else CANCELLED


def main(entrypoint: Callable[..., None]) -> None:
    """The command line of an experiment. Any error exits with code 1; NeMo-Run would return 0."""
    run.cli.main(entrypoint)
    if not _experiment_ended and "--help" not in sys.argv:
        sys.exit(1)
