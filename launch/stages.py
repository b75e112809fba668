"""One stage of an experiment (a batch script with its settings), and how NeMo-Run is to start it.

On Slurm, NeMo-Run writes and submits the job, and the job becomes our own batch script before
NeMo-Run's part of it begins: checks, checkpoints before the limit, requeue and verdict are those of
`sbatch slurm/...`. On this machine a stage is launch/torchrun.sh.
Not here: which stages make an experiment. NeMo-Run reads annotations, so they are not postponed.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nemo_run as run

ROOT = Path(__file__).resolve().parents[1]
SUCCEEDED = "SUCCEEDED"
_reached_the_end = False  # of an experiment; NeMo-Run prints an error and returns


@dataclass
class Stage:
    """What `sbatch slurm/<script>.sh <arguments>` would run."""

    name: str
    script: str  # sft, stable_opd_7b, evaluate, ...
    subcommand: str  # of `stable-opd`, as in the script
    config: str  # relative to the repository; "" where the subcommand takes none
    overrides: Sequence[str] = field(default_factory=tuple)

    @property
    def arguments(self) -> list[str]:
        return [self.config, *self.overrides] if self.config else list(self.overrides)


@run.cli.factory
@run.autoconvert
def slurm(
    account: str = "default",
    partition: str = "main",
    nodes: int = 1,
    gpus_per_node: int = 8,
    time: str = "24:00:00",
) -> run.SlurmExecutor:
    """Submit from a login node. NEMORUN_HOME must lie on the shared file system."""
    return run.SlurmExecutor(
        account=account,
        partition=partition,
        nodes=nodes,
        ntasks_per_node=1,
        gpus_per_node=gpus_per_node,
        time=time,
        exclusive=True,
        mem="0",
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
    """Hands the Slurm job over to one of our batch scripts.

    NeMo-Run's own job has no traps: the early signal would kill it, and a trap set there runs only
    after its srun. Becoming the script with `exec` leaves no second way to run a stage.
    """

    stage: Stage
    settings: dict[str, str] = field(default_factory=dict)  # of slurm/common.sh
    signal_seconds: int = 900  # before the time limit

    def setup(self, task, executor: run.Executor) -> None:
        assert isinstance(executor, run.SlurmExecutor)
        executor.signal = f"B:USR1@{self.signal_seconds}"
        # without it a stage whose parent failed waits for ever
        executor.additional_parameters = {"kill_on_invalid_dep": "yes"}
        settings = {"ROOT": str(ROOT), **self.settings}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
        script = shlex.join(
            ["bash", str(ROOT / "slurm" / f"{self.stage.script}.sh"), *self.stage.arguments]
        )
        executor.setup_lines = "\n".join(
            (
                # where `nemo experiment logs` looks
                "output=$(scontrol -o show job $SLURM_JOB_ID |",
                "  sed -nE 's/.* StdOut=(\\S+).*/\\1/p')",
                'log=$(dirname "$output")/$(basename "${output/sbatch_/log-}" .out)_'
                "${SLURM_RESTART_COUNT:-0}.out",
                f'exec env {exports} {script} >"$log" 2>&1',
            )
        )


def add(
    experiment: run.Experiment,
    stage: Stage,
    executor: run.Executor,
    after: Sequence[str] = (),
    settings: dict[str, str] | None = None,
) -> str:
    """Add a stage that starts when those in `after` have ended well.

    Returns:
        Its id, for the `after` of others.
    """
    executor = executor.clone()
    settings = settings or {}
    if isinstance(executor, run.SlurmExecutor):
        task = run.Script(path=str(ROOT / "slurm" / f"{stage.script}.sh"), args=stage.arguments)
        plugins: list[run.Plugin] = [BatchScript(stage=stage, settings=settings)]
    else:
        # NeMo-Run keeps the order on one machine, but starts a stage also after a failed parent
        executor.env_vars |= settings | {
            "DONE": str(note(experiment, stage.name)),
            "AFTER": " ".join(str(note(experiment, parent)) for parent in after),
        }
        task = run.Script(
            path=str(ROOT / "launch" / "torchrun.sh"), args=[stage.subcommand, *stage.arguments]
        )
        plugins = []
    return experiment.add(
        task, executor=executor, name=stage.name, dependencies=list(after), plugins=plugins
    )


def note(experiment: run.Experiment, stage: str) -> Path:
    """The file that says a stage of a local experiment ended well."""
    return ROOT / "runs" / "experiments" / experiment._id / stage


def launch(experiment: run.Experiment, context: run.cli.RunContext) -> None:
    """Start it; leaving the experiment's block waits for its end."""
    if not isinstance(context.executor, run.SlurmExecutor):
        note(experiment, "").mkdir(parents=True, exist_ok=True)
    context.launch(experiment)


def judge(experiment: run.Experiment, context: run.cli.RunContext) -> None:
    """Say how each stage ended; end with an error when some did not succeed.

    NeMo-Run itself returns 0 whatever happened. Call after the experiment's block.
    """
    global _reached_the_end
    _reached_the_end = True
    if context.dryrun or context.detach:
        return
    if isinstance(context.executor, run.SlurmExecutor):
        jobs = experiment.status(return_dict=True) or {}
        states = {name: str(job["status"]) for name, job in jobs.items()}
    else:
        states = {
            job.id: SUCCEEDED if note(experiment, job.id).exists() else "FAILED"
            for job in experiment.jobs
        }
    for name, state in states.items():
        print(f"{name}: {state}")
    if any(state != SUCCEEDED for state in states.values()):
        sys.exit(1)


def main(entrypoint: Callable[..., None]) -> None:
    """The command line of an experiment; any error is an exit code, which NeMo-Run's own is not."""
    run.cli.main(entrypoint)
    if not _reached_the_end and "--help" not in sys.argv:
        sys.exit(1)


def batch_settings() -> dict[str, str]:
    """The settings of slurm/common.sh and launch/torchrun.sh that stand in this environment."""
    names = ("VENV", "CONTAINER_IMAGE", "CONTAINER_MOUNTS", "RANKS", "RANKS_PER_NODE")
    names += ("SERVER_NODES", "PREFLIGHT", "REQUIRE_GPU", "MIN_FREE_GIB", "MIN_ALLREDUCE_GBPS")
    return {name: os.environ[name] for name in names if name in os.environ}
