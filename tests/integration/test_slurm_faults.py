"""Faults of the site or of the user on a real Slurm: the right verdict at the first attempt."""

import re
import signal
import subprocess

import pytest

from tests.integration.slurm_cluster import SlurmCluster, nodes_here
from tests.integration.slurm_run import PATIENCE_SECONDS, Run

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("venv", {"VENV": "/wrong"}, "/wrong/bin/python"),
        (
            "refused",  # SLURM_GRES is an option of srun
            {"SLURM_GRES": "unicorn:1", "MAX_REQUEUES": "0"},
            "^Slurm did not start the checks: srun: error: .*Invalid generic resource",
        ),
    ],
)
def test_a_fault_of_every_node_fails_at_the_first_attempt(
    cluster, tmp_path, name, settings, reason
):
    """No node is excluded, and no step is trained."""
    run = Run(cluster, tmp_path, name)
    job = run.submit(settings=settings)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    (verdict,) = run.verdicts()
    assert verdict["verdict"] == "failed"
    assert re.search(reason, verdict["reason"], re.DOTALL)
    assert cluster.field(job, "ExcNodeList") in ("", "(null)")
    assert "bad node" not in run.text()
    assert not run.rows()


def test_a_job_without_permission_to_be_queued_again_says_so(cluster, tmp_path):
    run = Run(cluster, tmp_path, "norequeue")
    job = run.submit(options=("--no-requeue",))
    run.until_step(2)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    (verdict,) = run.verdicts()
    assert verdict["verdict"] == "stopped"
    assert "stopped after a step, checkpoint" in verdict["reason"]
    assert "not queued again" in verdict["reason"]
    assert not verdict["queued_again"]


def test_a_task_of_an_array_is_queued_again_without_the_others(cluster, tmp_path):
    """The last task has the id of the whole array as its SLURM_JOB_ID."""
    script = tmp_path / "seeds.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --requeue\n"
        f"export LOG_DIR={tmp_path}/seed_$SLURM_ARRAY_TASK_ID-logs\n"
        'source "$SLURM_SUBMIT_DIR/slurm/common.sh"\n'
        'run_on_cluster train "$@" "++run.name=seed_$SLURM_ARRAY_TASK_ID"\n'
    )
    first, last = Run(cluster, tmp_path, "seed_1"), Run(cluster, tmp_path, "seed_2")
    last.command[0] = str(script)
    job = last.submit(settings={"LOG_DIR": ""}, options=("--array=1-2", "--nodes=1"))
    first.until_step(2)
    last.until_step(2)
    cluster.call("scancel", "--batch", "--signal=USR1", f"{job}_2")
    last.until_verdicts(1)
    last.until(lambda: cluster.state(f"{job}_2") == "PENDING", "task 2 queued again")
    assert cluster.field(f"{job}_2", "Restarts") == "1"
    assert last.verdicts()[0]["verdict"] == "stopped"
    assert cluster.field(f"{job}_1", "Restarts") == "0"
    assert not first.verdicts() or first.verdicts()[0]["verdict"] == "done"
    cluster.call("scancel", job)


def test_a_process_that_slurm_has_lost_ends_with_the_cluster(cluster, tmp_path):
    """`cluster` skips the test without Slurm."""
    with SlurmCluster(tmp_path / "cluster", nodes_here(["n1"])) as own:
        lost = subprocess.Popen(["sleep", "600"], env=own.env)
        lost.send_signal(signal.SIGSTOP)
    assert lost.wait(60) == -signal.SIGKILL
