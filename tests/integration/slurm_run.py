"""A training run on the test cluster: submit it as a user does, observe it, disturb it.

run = Run(cluster, tmp_path, "name")
job = run.submit("kl.beta=0.3", options=("--nodes=2",))
run.until_step(2)
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.config.cases import layered
from tests.integration.processes import running
from tests.integration.slurm_cluster import SlurmCluster

STEPS = 20
PATIENCE_SECONDS = 240  # enough on a busy machine; events with a deadline have their own
TINY = [
    "configs/smoke_cpu.yaml",
    f"train.steps={STEPS}",
    "rollout.prompts_per_step=4",
    "sampling.max_new_tokens=16",
    "evaluation.every=0",
    "checkpoint.every=3",
    "monitoring.tensorboard=false",
]
MACHINE_KEYS = ("time/", "throughput/", "memory/")  # metrics that differ between identical runs


class Run:
    """One run of a batch script and its files."""

    def __init__(
        self, cluster: SlurmCluster, directory: Path, name: str, script: str = "stable_opd_7b"
    ):
        self.cluster = cluster
        self.directory = directory / name
        self.logs = directory / f"{name}-logs"
        self.output = directory / f"{name}.out"
        place = (f"run.directory={directory}", f"run.name={name}")
        self.command = [f"slurm/{script}.sh", *TINY, *place]

    def submit(
        self,
        *overrides: str,
        options: tuple[str, ...] = (),
        settings: dict[str, str] | None = None,
    ) -> str:
        env = {
            "VENV": str(Path(sys.executable).parents[1]),
            "LOG_DIR": str(self.logs),
            "RANKS_PER_NODE": "1",
            "REQUIRE_GPU": "0",
            "GPU": "cpu",
            "MIN_FREE_GIB": "0.1",
            "PREFLIGHT": "off",
            "CHECK": "off",  # `train` checks anyway; some tests switch both on
            "OMP_NUM_THREADS": "1",
        }
        return self.cluster.submit(
            layered(*self.command, *overrides),
            options=["--nodes=2", "--time=01:00:00", f"--output={self.output}", *options],
            env=env | (settings or {}),
        )

    def rows(self) -> list[dict]:
        path = self.directory / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self.cluster.until(condition, PATIENCE_SECONDS, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n== {self.output.name}\n{self.text()}") from None

    def until_step(self, step: int) -> None:
        self.until(lambda: any(row["step"] >= step for row in self.rows()), f"step {step}")

    def until_attempt(self, attempt: int) -> None:
        self.until((self.logs / f"attempt_{attempt}" / "exits").is_dir, f"attempt {attempt}")

    def until_verdicts(self, count: int) -> None:
        self.until(lambda: len(self.verdicts()) == count, f"{count} verdicts")

    def verdicts(self) -> list[dict]:
        path = self.logs / "verdicts.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def text(self) -> str:
        """Output of the batch script."""
        return self.output.read_text() if self.output.exists() else "(no output)"

    def signal_ranks(self, number: signal.Signals, *ranks: int) -> None:
        """Signal the trainer processes, not the shells above them."""
        pids = {}
        for pid, command, environment in running():
            mine = f"run.name={self.directory.name}" in command and "train" in command
            if mine and "RANK" in environment and Path(command[0]).name.startswith("py"):
                pids[int(environment["RANK"])] = pid
        for rank in ranks:
            if number != signal.SIGCONT or rank in pids:  # a rank may have ended while stopped
                os.kill(pids[rank], number)

    def server_process(self, job: str) -> int:
        """Process id of an SGLang server of the job, not of the `stable-opd serve` above it."""
        for pid, command, environment in running():
            serves = any(part.endswith("launch_server.py") for part in command)
            if serves and environment.get("SLURM_JOB_ID") == job:
                return pid
        raise AssertionError(f"job {job} has no server\n{self.text()}")

    @contextmanager
    def frozen_at(self, step: int) -> Iterator[None]:
        """Stop both ranks after `step`, and let them continue after the block."""
        self.until_step(step)
        self.signal_ranks(signal.SIGSTOP, 0, 1)
        assert self.rows()[-1]["step"] < STEPS, "the run was over before it could be held"
        yield
        self.signal_ranks(signal.SIGCONT, 0, 1)

    def until_asked_to_stop(self, times: int) -> None:
        asked = "USR1: the job has to end"
        self.until(lambda: self.text().count(asked) == times, f"{times} times USR1")


def without_machine_metrics(rows: list[dict]) -> list[dict]:
    return [
        {key: value for key, value in row.items() if not key.startswith(MACHINE_KEYS)}
        for row in rows
    ]
