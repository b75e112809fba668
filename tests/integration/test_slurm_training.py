"""The shipped batch scripts on a real Slurm: three nodes, CPU ranks, a tiny student, real training.

A job takes about a minute, so a test puts several faults into one run: a run that loses its nodes
in four ways, one that hangs and then crashes, one whose servers end with the job or earlier.
"""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.sglang_tools import PYTHON, needs_sglang
from tests.integration.slurm_run import PATIENCE_SECONDS, STEPS, Run, without_machine_metrics

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> Run:
    """A run without faults after its checks have excluded one node with a bad GPU."""
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
        "CHECK": "on",
        "REQUIRE_GPU": "1",
        "MIN_ALLREDUCE_GBPS": "0.0001",
        "PATH": f"{directory / 'bin'}:{cluster.env['PATH']}",
    }
    job = run.submit(settings=settings)
    cluster.wait(job, {"COMPLETED"}, PATIENCE_SECONDS)
    return run


@pytest.fixture(scope="module")
def silenced(cluster, tmp_path_factory) -> Run | None:
    """A run whose second node falls silent, in parallel with the other tests, because it takes
    minutes. None when the nodes have no network of their own."""
    if not cluster.nodes["n5"].has_own_network:
        return None
    run = Run(cluster, tmp_path_factory.mktemp("silenced"), "silenced")
    run.submit("fault.watchdog_minutes=0.6", options=("--partition=aside",))
    run.until_step(2)
    cluster.set_link("n5", "down")
    assert run.rows()[-1]["step"] < STEPS, "the run was over before its node could fall silent"

    def restore_link() -> None:  # until then Slurm waits for the node to end the job there
        run.until_verdicts(1)
        cluster.set_link("n5", "up")

    threading.Thread(target=restore_link, daemon=True).start()
    return run


def test_a_bad_node_is_excluded(undisturbed, silenced):  # `silenced` starts here
    assert "n1: GPU 0: ecc.errors.uncorrected.volatile.total is 3" in undisturbed.text()
    assert [v["verdict"] for v in undisturbed.verdicts()] == ["requeued", "done"]
    ranks = undisturbed.logs / "attempt_1" / "ranks"
    assert sorted(path.read_text().strip() for path in ranks.iterdir()) == ["n2", "n3"]


def test_the_script_trains_to_the_end(undisturbed):
    assert [row["step"] for row in undisturbed.rows()] == list(range(1, STEPS + 1))
    assert (undisturbed.directory / "model" / "config.json").is_file()
    assert (undisturbed.directory / "report.html").is_file()


def test_a_run_that_loses_its_nodes_four_times_ends_the_same(cluster, undisturbed, tmp_path):
    run = Run(cluster, tmp_path, "disturbed")
    job = run.submit(options=("--signal=B:USR1@120",))

    with run.frozen_at(2):  # the time limit approaches
        minutes = int(cluster.field(job, "RunTime").split(":")[1]) + 2
        cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
        run.until_asked_to_stop(times=1)
    run.until_verdicts(1)
    longer = ("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    run.until(lambda: cluster.succeeds(*longer), "a time limit for the next attempt")
    run.until_attempt(1)

    with run.frozen_at(run.rows()[-1]["step"] + 1):  # a job with higher priority takes all nodes
        options = ("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null")
        cluster.submit(["--wrap=sleep 1"], options=options)
        run.until_asked_to_stop(times=2)
    run.until_verdicts(2)
    run.until_attempt(2)

    with run.frozen_at(run.rows()[-1]["step"] + 1):  # a node fails
        lost = (run.logs / "attempt_2" / "ranks" / "rank_00001").read_text().strip()
        cluster.lose_node(lost)
        run.until_attempt(3)

    with run.frozen_at(run.rows()[-1]["step"] + 1):  # a user cancels the job ...
        cluster.call("scancel", job)  # Slurm lets stopped processes continue, to end them
        cluster.wait(job, {"CANCELLED"}, PATIENCE_SECONDS)
    assert run.verdicts()[-1]["reason"].startswith("stopped after a step, checkpoint")
    cluster.restore_node(lost)
    again = run.submit(
        settings={"LOG_DIR": str(tmp_path / "second-logs")}
    )  # ... and submits it again
    cluster.wait(again, {"COMPLETED"}, PATIENCE_SECONDS)

    assert [v["verdict"] for v in run.verdicts()[:2]] == ["stopped", "stopped"]
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert without_machine_metrics(run.rows()) == without_machine_metrics(undisturbed.rows())


def test_a_hang_is_ended_and_a_crash_is_named(cluster, tmp_path):
    run = Run(cluster, tmp_path, "troubled")
    job = run.submit("train.steps=1000", "fault.watchdog_minutes=0.6")

    run.until_step(2)
    run.signal_ranks(signal.SIGSTOP, 1)
    run.until_verdicts(1)
    hang = run.verdicts()[0]
    assert hang["verdict"] == "hang"
    assert hang["reason"].startswith("no step within fault.watchdog_minutes")
    assert hang["reason"].endswith("; queued again")
    assert "(most recent call first)" in run.text()
    assert "torch/distributed/" in run.text()  # where rank 0 waited for the other
    run.until_attempt(1)
    step = run.rows()[-1]["step"]

    run.until_step(step + 1)
    run.signal_ranks(signal.SIGKILL, 1)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    crash = run.verdicts()[1]
    assert (crash["verdict"], crash["rank"], crash["exit_code"]) == ("failed", 1, 137)
    assert crash["node"] == (run.logs / "attempt_1" / "ranks" / "rank_00001").read_text().strip()


@needs_sglang
def test_no_step_is_lost_when_servers_end(cluster, tmp_path):
    run = Run(cluster, tmp_path, "served")

    def submit(logs: Path) -> str:
        return run.submit(
            f"rollout.sglang.python={PYTHON}",
            "rollout.sglang.arguments=[--max-total-tokens=8192]",
            "rollout.sglang.num_servers=1",
            "evaluation.every=20",  # through the server
            "evaluation.max_new_tokens=8",
            "checkpoint.every=1000",  # only the checkpoints that a stop requests
            options=("--nodes=3",),
            settings={"SERVER_NODES": "1", "CHECK": "on", "LOG_DIR": str(logs)},
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
    output = run.text()
    (node,) = set(re.findall(r"server 0 on (n\d) is healthy", output))
    assert output.count(f"server 0 on {node} is healthy") == 2
    assert f"server 0 on {node} ended: start 1" in output
    assert [v["verdict"] for v in run.verdicts()] == ["done"]
    assert [row["step"] for row in run.rows()] == list(range(STEPS + 1))  # 0: an evaluation
    assert "eval/accuracy" in run.rows()[STEPS]
    events = (run.directory / "sglang" / "events.jsonl").read_text().splitlines()
    assert any(json.loads(line)["event"] == "failure" for line in events)
    check_keys_are_secret(tmp_path)


def check_keys_are_secret(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    keys = [path for path in files if path.name == "api_key"]
    assert len(keys) == 2  # one per job
    for key_file in keys:
        assert key_file.stat().st_mode & 0o077 == 0
        key = key_file.read_bytes().strip()
        assert not [path for path in files if path not in keys and key in path.read_bytes()]


@needs_sglang
def test_the_script_samples_and_evaluates_on_the_trainers_gpus(cluster, tmp_path):
    """One node, two ranks of one tensor-parallel group, two servers: one on each rank's GPU."""
    run = Run(cluster, tmp_path, "colocated")
    job = run.submit(
        f"rollout.sglang.python={PYTHON}",
        "rollout.sglang.arguments=[--max-total-tokens=8192]",
        "rollout.engine=sglang",
        "rollout.sglang.placement=colocated",
        "parallel.tensor=2",
        "train.steps=3",
        "evaluation.every=3",
        "evaluation.max_new_tokens=8",
        options=("--nodes=1",),
        settings={"RANKS_PER_NODE": "2"},
    )
    cluster.wait(job, {"COMPLETED"}, PATIENCE_SECONDS)
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3]
    assert all("eval/accuracy" in run.rows()[place] for place in (0, 3))
    served = ("server_0", "server_1")
    logs = [(run.directory / "sglang" / f"{name}.log").read_text() for name in served]
    assert all("POST /update_weights_from_tensor" in log for log in logs)
    assert all("POST /generate" in log for log in logs)


ONE_OF_TWO = """
import http.server, sys

settings = dict(argument.lstrip("+").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
address = (settings["rollout.sglang.host"], int(settings["rollout.sglang.port"]))

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(address, Healthy).serve_forever()
"""


def test_the_trainer_waits_for_every_server_of_a_node(cluster, tmp_path):
    (tmp_path / "one_of_two.py").write_text(ONE_OF_TWO)
    run = Run(cluster, tmp_path, "half")
    settings = {
        "SERVER_NODES": "1",
        "SERVER_COMMAND": f"{sys.executable} {tmp_path}/one_of_two.py",
        "SERVER_TIMEOUT": "10",
    }
    job = run.submit("rollout.sglang.num_servers=2", options=("--nodes=2",), settings=settings)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    port = 12000 + int(job) % 9000 + 10000
    reason = run.verdicts()[0]["reason"]
    assert re.search(rf"server 0 on n\d is not healthy.*:{port + 1};", reason)


def test_a_silent_node_is_excluded(silenced, undisturbed):
    if silenced is None:
        pytest.skip("the nodes share this machine's network: no link to cut")
    silenced.until_verdicts(2)
    lost, done = silenced.verdicts()
    assert (lost["verdict"], lost["excluded"]) == ("lost", ["n5"])
    assert lost["reason"] == "n5: runs no command; excluded n5; queued again"
    assert "(most recent call first)" in silenced.text()  # where the other rank waited for it
    assert done["verdict"] == "done"
    ranks = silenced.logs / "attempt_1" / "ranks"
    assert sorted(path.read_text().strip() for path in ranks.iterdir()) == ["n4", "n6"]
    assert without_machine_metrics(silenced.rows()) == without_machine_metrics(undisturbed.rows())
