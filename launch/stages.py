"""Stages of an experiment (batch scripts with their arguments), and how NeMo-Run is to start them.

On Slurm, NeMo-Run writes and submits the job, and the job becomes our own batch script before
NeMo-Run's part of it begins: resources, checks, checkpoints before the limit, requeue and verdict
are those of `sbatch slurm/...`. On this machine a stage is launch/torchrun.sh.
Not here: which stages make an experiment. NeMo-Run reads annotations, so they are not postponed.
"""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nemo_run as run

ROOT = Path(__file__).resolve().parents[1]
SUCCEEDED, FAILED, CANCELLED = "SUCCEEDED", "FAILED", "CANCELLED"
_reached_the_end = False  # of an experiment; NeMo-Run prints an error and returns


@dataclass(frozen=True)
class Stage:
    """What `sbatch slurm/<script>.sh <arguments>` would run, once those in `after` ended well."""

    name: str
    script: str  # sft, stable_opd_7b, evaluate, ...
    subcommand: str  # of `stable-opd`, as in the script
    arguments: Sequence[str]
    after: Sequence[str] = ()  # names of stages before it


@run.cli.factory
@run.autoconvert
def slurm() -> run.SlurmExecutor:
    """Submit from a login node; `run.executor.partition=h200` sets any of NeMo-Run's fields.

    What is 0 or empty here is as the stage's own script says. NEMORUN_HOME must lie on the shared
    file system.
    """
    return run.SlurmExecutor(
        account=None,  # type: ignore  # the user's own
        nodes=0,
        time="",
        ntasks_per_node=1,
        tunnel=run.LocalTunnel(job_dir=""),  # any other directory and sbatch does not find the job
        packager=run.Packager(),  # the code is the shared checkout, as for sbatch
    )


@run.cli.factory
@run.autoconvert
def local() -> run.LocalExecutor:
    """Run on this machine, one stage after the other."""
    return run.LocalExecutor(packager=run.Packager())


@dataclass(kw_only=True)
class BatchScript(run.Plugin):
    """Hands the Slurm job over to one of our batch scripts, with the resources and the early signal
    that its #SBATCH lines ask for.

    NeMo-Run's own job has no traps: the early signal would kill it, and a trap set there runs only
    after its srun. Becoming the script with `exec` leaves no second way to run a stage.
    """

    stage: Stage

    def setup(self, task, executor: run.Executor) -> None:
        assert isinstance(executor, run.SlurmExecutor)
        script = ROOT / "slurm" / f"{self.stage.script}.sh"
        asked = r"^#SBATCH --([\w-]+)(?:=(\S+))?"  # a flag has no value
        lines: dict[str, str] = dict(re.findall(asked, script.read_text(), re.MULTILINE))
        executor.nodes = executor.nodes or int(lines["nodes"])
        if executor.gpus_per_node is None and "gpus-per-node" in lines:
            executor.gpus_per_node = int(lines["gpus-per-node"])
        executor.time = executor.time or lines["time"]
        executor.mem = executor.mem or lines.get("mem")
        executor.exclusive = executor.exclusive or "exclusive" in lines or None
        executor.signal = executor.signal or lines["signal"]
        experiment = self.experiment_id.rpartition("_")[0]  # which NeMo-Run makes of name and time
        executor.job_name_prefix = executor.job_name_prefix or f"{experiment}."
        # without it a stage whose parent failed waits for ever
        more = executor.additional_parameters or {}
        executor.additional_parameters = {"kill_on_invalid_dep": "yes", **more}
        command = shlex.join(["bash", str(script), *self.stage.arguments])
        executor.setup_lines = "\n".join(
            (
                # where `nemo experiment logs` looks, in one file for all attempts
                "output=$(scontrol -o show job $SLURM_JOB_ID |",
                "  sed -nE 's/.* StdOut=(\\S+).*/\\1/p')",
                'log=$(dirname "$output")/$(basename "${output/sbatch_/log-}" .out)_0.out',
                f'exec env ROOT={shlex.quote(str(ROOT))} {command} >>"$log" 2>&1',
            )
        )


def run_stages(context: run.cli.RunContext, name: str, stages: Sequence[Stage]) -> None:
    """Run the experiment, say how each stage ended, and end with an error when one did not succeed:
    NeMo-Run itself returns 0 whatever happened.

    Raises:
        ValueError: no executor, or a stage whose script or config is not there.
    """
    global _reached_the_end
    if context.executor is None:
        raise ValueError("say where it runs: run.executor=slurm or run.executor=local")
    for stage in stages:
        configs = [argument for argument in stage.arguments if argument.endswith(".yaml")]
        for file in (f"slurm/{stage.script}.sh", *configs):
            if not (ROOT / file).is_file():
                raise ValueError(f"{stage.name}: no {ROOT / file}; name a config, or another size")
    with run.Experiment(name, executor=context.executor) as experiment:
        for stage in stages:
            add(experiment, stage, context.executor)
        context.launch(experiment)
    _reached_the_end = True
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


def add(experiment: run.Experiment, stage: Stage, executor: run.Executor) -> None:
    """Add a stage; on this machine it also waits for the one added before it."""
    if isinstance(executor, run.SlurmExecutor):
        experiment.add(
            run.Script(path=str(ROOT / "slurm" / f"{stage.script}.sh"), args=[*stage.arguments]),
            executor=executor,
            name=stage.name,
            dependencies=[*stage.after],
            plugins=[BatchScript(stage=stage)],
        )
        # it has done its part; stored with the job, `nemo experiment` could not import it
        experiment.jobs[-1].plugins = None
        return
    # NeMo-Run keeps the order on one machine, but starts a stage also after a failed parent
    executor = executor.clone()
    executor.env_vars |= {
        "DONE": str(note(experiment, stage.name)),
        "AFTER": " ".join(str(note(experiment, parent)) for parent in stage.after),
    }
    experiment.add(
        run.Script(
            path=str(ROOT / "launch" / "torchrun.sh"), args=[stage.subcommand, *stage.arguments]
        ),
        executor=executor,
        name=stage.name,
        dependencies=[job.id for job in experiment.jobs[-1:]],
    )


def note(experiment: run.Experiment, stage: str) -> Path:
    """The file that says a stage of a local experiment ended well."""
    return Path(experiment._exp_dir) / f"{stage}.succeeded"


def local_state(experiment: run.Experiment, stage: Stage) -> str:
    if note(experiment, stage.name).exists():
        return SUCCEEDED
    started = all(note(experiment, parent).exists() for parent in stage.after)
    return FAILED if started else CANCELLED


def main(entrypoint: Callable[..., None]) -> None:
    """The command line of an experiment; any error is an exit code, which NeMo-Run's own is not."""
    run.cli.main(entrypoint)
    if not _reached_the_end and "--help" not in sys.argv:
        sys.exit(1)
