"""The shipped batch scripts on a real Slurm: three nodes, CPU ranks, a tiny student, real training.

Most cost a minute, so each tells one long story: a run that loses its nodes in every way and still
ends like one left alone, one that hangs and then crashes, one whose servers end with it and alone.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.sglang_tools import PYTHON, needs_sglang
from tests.integration.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.cluster

STEPS = 20
PATIENCE_SECONDS = 240  # on a busy machine; what must come sooner says so
TINY = [
    "configs/smoke_cpu.yaml",
    f"train.steps={STEPS}",
    "rollout.prompts_per_step=4",
    "sampling.max_new_tokens=16",
    "evaluation.every=0",
    "checkpoint.every=3",
    "monitoring.tensorboard=false",
]
MACHINE_KEYS = ("time/", "throughput/", "memory/")  # metrics that no two runs share


class Run:
    """One run of a batch script and the files it leaves."""

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
        virtual_environment = Path(sys.executable).parents[1]
        env = {
            "VENV": str(virtual_environment),
            "LOG_DIR": str(self.logs),
            "RANKS_PER_NODE": "1",
            "REQUIRE_GPU": "0",
            "MIN_FREE_GIB": "0.1",
            "PREFLIGHT": "off",
            "OMP_NUM_THREADS": "1",
        }
        return self.cluster.submit(
            [*self.command, *overrides],
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
            raise AssertionError(f"{error}\n== {self.output.name}\n{self.told()}") from None

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

    def told(self) -> str:
        return self.output.read_text() if self.output.exists() else "(no output)"

    def signal_ranks(self, number: signal.Signals, *ranks: int) -> None:
        """To the trainer processes themselves, not to the shells above them."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            mine = f"run.name={self.directory.name}".encode() in command and b"train" in command
            rank = next((v[5:] for v in environment if v.startswith(b"RANK=")), None)
            if mine and rank is not None and Path(os.fsdecode(command[0])).name.startswith("py"):
                found[int(rank)] = int(process.name)
        for rank in ranks:
            if number != signal.SIGCONT or rank in found:  # those that are gone need not go on
                os.kill(found[rank], number)

    def server_process(self, job: str) -> int:
        """An SGLang process of the job, not the `stable-opd serve` above it."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"sglang_cpu/serve.py" in command and f"SLURM_JOB_ID={job}".encode() in environment:
                return int(process.name)
        raise AssertionError(f"job {job} has no server\n{self.told()}")

    @contextmanager
    def frozen_at(self, step: int) -> Iterator[None]:
        """Holds both ranks once `step` is done, so that what happens in the block happens there."""
        self.until_step(step)
        self.signal_ranks(signal.SIGSTOP, 0, 1)
        assert self.rows()[-1]["step"] < STEPS, "the run was over before it could be held"
        yield
        self.signal_ranks(signal.SIGCONT, 0, 1)

    def until_asked_to_stop(self, times: int) -> None:
        asked = "USR1: the nodes are wanted"
        self.until(lambda: self.told().count(asked) == times, f"{times} times USR1")


def what_was_learnt(rows: list[dict]) -> list[dict]:
    return [
        {key: value for key, value in row.items() if not key.startswith(MACHINE_KEYS)}
        for row in rows
    ]


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> Run:
    """A run that ends at its first attempt that starts, all checks on, one node with a bad GPU."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "bin").mkdir()
    smi = directory / "bin" / "nvidia-smi"
    smi.write_text(
        "#!/bin/bash\n"
        'errors=0; [ "$SLURMD_NODENAME" != n1 ] || errors=3\n'
        'echo "0, $errors, No, No, No, Not Active, Not Active, Not Active"\n'
    )
    smi.chmod(0o755)
    run = Run(cluster, directory, "undisturbed")
    settings = {
        "PREFLIGHT": "on",
        "REQUIRE_GPU": "1",
        "MIN_ALLREDUCE_GBPS": "0.0001",
        "PATH": f"{directory / 'bin'}:{cluster.env['PATH']}",
    }
    job = run.submit(settings=settings)
    cluster.wait(job, {"COMPLETED"}, PATIENCE_SECONDS)
    return run


def test_a_bad_node_is_named_and_left_out(undisturbed):
    assert "n1: GPU 0: ecc.errors.uncorrected.volatile.total is 3" in undisturbed.told()
    assert [v["verdict"] for v in undisturbed.verdicts()] == ["requeued", "done"]
    ranks = undisturbed.logs / "attempt_1" / "ranks"
    assert sorted(path.read_text().strip() for path in ranks.iterdir()) == ["n2", "n3"]


def test_the_script_trains_to_the_end(undisturbed):
    assert [row["step"] for row in undisturbed.rows()] == list(range(1, STEPS + 1))
    assert (undisturbed.directory / "model" / "config.json").is_file()
    assert (undisturbed.directory / "report.html").is_file()


def test_a_run_that_loses_its_nodes_in_every_way_ends_the_same(cluster, undisturbed, tmp_path):
    run = Run(cluster, tmp_path, "disturbed")
    job = run.submit(options=("--signal=B:USR1@120",))

    with run.frozen_at(2):  # the time limit comes near
        minutes = int(cluster.field(job, "RunTime").split(":")[1]) + 2
        cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
        run.until_asked_to_stop(times=1)
    run.until_verdicts(1)
    longer = ("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    run.until(lambda: cluster.succeeds(*longer), "a time limit for the next attempt")
    run.until_attempt(1)

    with run.frozen_at(run.rows()[-1]["step"] + 1):  # a job with more priority takes all nodes
        options = ("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null")
        cluster.submit(["--wrap=sleep 1"], options=options)
        run.until_asked_to_stop(times=2)
    run.until_verdicts(2)
    run.until_attempt(2)

    with run.frozen_at(run.rows()[-1]["step"] + 1):  # a node goes dark
        lost = (run.logs / "attempt_2" / "ranks" / "rank_00001").read_text().strip()
        cluster.lose_node(lost)
        run.until_attempt(3)

    with run.frozen_at(run.rows()[-1]["step"] + 1):  # someone cancels the job ...
        cluster.call("scancel", job)  # Slurm lets stopped processes go on, to end
        cluster.wait(job, {"CANCELLED"}, PATIENCE_SECONDS)
    assert run.verdicts()[-1]["reason"].startswith("stopped after a step, checkpoint")
    cluster.restore_node(lost)
    again = run.submit(settings={"LOG_DIR": str(tmp_path / "second-logs")})  # ... and submits it
    cluster.wait(again, {"COMPLETED"}, PATIENCE_SECONDS)

    assert [v["verdict"] for v in run.verdicts()[:2]] == ["stopped", "stopped"]
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert what_was_learnt(run.rows()) == what_was_learnt(undisturbed.rows())


def test_a_hang_is_ended_and_a_crash_is_named(cluster, tmp_path):
    run = Run(cluster, tmp_path, "troubled")
    job = run.submit("train.steps=1000", "fault.watchdog_minutes=0.6")

    run.until_step(2)
    run.signal_ranks(signal.SIGSTOP, 1)
    run.until_verdicts(1)
    hang = run.verdicts()[0]
    assert hang["verdict"] == "hang"
    stopped_on = (run.logs / "attempt_0" / "ranks" / "rank_00001").read_text().strip()
    assert hang["reason"].endswith(f"stood still: rank_00001 on {stopped_on}; queued again")
    assert "(most recent call first)" in run.told()
    assert "torch/distributed/" in run.told()  # where rank 0 waited for the other
    run.until_attempt(1)
    step = run.rows()[-1]["step"]

    run.until_step(step + 1)
    run.signal_ranks(signal.SIGKILL, 1)
    cluster.wait(job, {"FAILED"}, timeout=60)
    crash = run.verdicts()[1]
    assert (crash["verdict"], crash["rank"], crash["exit_code"]) == ("failed", 1, 137)
    assert crash["node"] == (run.logs / "attempt_1" / "ranks" / "rank_00001").read_text().strip()


@needs_sglang
def test_servers_that_end_with_the_job_or_alone_cost_no_step(cluster, tmp_path):
    run = Run(cluster, tmp_path, "served")

    def submit(logs: Path) -> str:
        return run.submit(
            f"rollout.sglang.python={PYTHON}",
            "rollout.sglang.arguments=[--max-total-tokens=8192]",
            "checkpoint.every=1000",  # none but those that something asks for
            options=("--nodes=3",),
            settings={"SERVER_NODES": "1", "SERVERS_PER_NODE": "2", "LOG_DIR": str(logs)},
        )

    job = submit(tmp_path / "first-logs")
    run.until_step(2)
    cluster.call("scancel", job)  # ends trainers and servers at the same moment
    cluster.wait(job, {"CANCELLED"}, PATIENCE_SECONDS)
    saved = run.rows()[-1]["step"]
    assert saved < STEPS, "the run was over before it could be cancelled"
    verdict = json.loads((tmp_path / "first-logs" / "verdict.json").read_text())
    assert verdict["reason"] == f'stopped after a step, checkpoint {{"step": {saved}}}'

    job = submit(run.logs)
    run.until_step(saved + 2)
    os.kill(run.server_process(job), signal.SIGKILL)
    assert run.rows()[-1]["step"] < STEPS, "the run was over before its server could die"
    cluster.wait(job, {"COMPLETED"}, PATIENCE_SECONDS)
    told = run.told()
    assert told.count("server 0 on n3 is healthy") == 2
    assert "server 0 on n3 ended: start 1" in told
    assert [v["verdict"] for v in run.verdicts()] == ["done"]
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    events = (run.directory / "sglang" / "events.jsonl").read_text().splitlines()
    assert any(json.loads(line)["event"] == "failure" for line in events)
    check_that_keys_stay_secret(tmp_path)


def check_that_keys_stay_secret(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    keys = [path for path in files if path.name == "api_key"]
    assert len(keys) == 2  # one of each job
    for key_file in keys:
        assert key_file.stat().st_mode & 0o077 == 0
        key = key_file.read_bytes().strip()
        assert not [path for path in files if path not in keys and key in path.read_bytes()]


def test_a_wrong_setting_ends_before_anything_starts(cluster, tmp_path):
    run = Run(cluster, tmp_path, "misspelt")
    job = run.submit("train.stepz=3", options=("--nodes=1",))
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    assert "train.stepz" in run.verdicts()[0]["reason"]
    assert not run.directory.exists()


def test_a_server_that_never_gets_healthy_is_named(cluster, tmp_path):
    run = Run(cluster, tmp_path, "serverless")
    settings = {"SERVER_NODES": "1", "SERVER_COMMAND": "false", "SERVER_RESTARTS": "1"}
    job = run.submit(options=("--nodes=2",), settings=settings)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    assert "server 0 on n2 is not healthy" in run.verdicts()[0]["reason"]
    assert run.told().count("server 0 on n2 ended") == 1


ONE_OF_TWO = """
import http.server, sys

settings = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
address = (settings["rollout.sglang.host"], int(settings["rollout.sglang.port"]))

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(address, Healthy).serve_forever()
"""


def test_every_server_of_a_node_is_waited_for(cluster, tmp_path):
    (tmp_path / "one_of_two.py").write_text(ONE_OF_TWO)
    run = Run(cluster, tmp_path, "half")
    settings = {
        "SERVER_NODES": "1",
        "SERVERS_PER_NODE": "2",
        "SERVER_COMMAND": f"{sys.executable} {tmp_path}/one_of_two.py",
        "SERVER_TIMEOUT": "3",
    }
    job = run.submit(options=("--nodes=2",), settings=settings)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    port = 12000 + int(job) % 10000 + 10000
    reason = run.verdicts()[0]["reason"]
    assert "server 0 on n2 is not healthy" in reason and f":{port + 1};" in reason


def test_benchmarks_are_evaluated_by_name(cluster, tmp_path):
    rows = {  # with the columns that the hub's data sets have
        "amc": [{"problem": "2+1", "answer": 3.0}, {"problem": "4-1*2", "answer": 1.0}],
        "olympiadbench": [
            {"question": "2*2", "context": None, "final_answer": ["4"]},
            {"question": "3+3", "context": None, "final_answer": ["1"]},
        ],
    }
    for name, records in rows.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text)
    run = Run(cluster, tmp_path, "benchmarks", script="evaluate")
    job = run.submit(
        f"evaluation.benchmarks=[{','.join(rows)}]",
        f"evaluation.benchmark_directory={tmp_path}",
    )
    cluster.wait(job, {"COMPLETED"}, PATIENCE_SECONDS)
    found = json.loads((run.directory / "evaluation.json").read_text())
    counts = {name: (of["num_prompts"], of["num_samples"]) for name, of in found.items()}
    assert counts == {"amc": (2, 32), "olympiadbench": (2, 1)}
    table = (run.logs / "attempt_0" / "rank_00000.log").read_text().splitlines()
    assert [line.split()[0] for line in table[-3:]] == [*rows, "average"]
    assert [v["verdict"] for v in run.verdicts()] == ["done"]
