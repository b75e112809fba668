"""Faults of the site or of the user on a real Slurm: the right verdict at the first attempt."""

import re

import pytest

from tests.integration.slurm_run import PATIENCE_SECONDS, Run

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("name", "overrides", "settings", "reason"),
    [
        ("venv", (), {"VENV": "/wrong"}, "/wrong/bin/python"),
        (
            "floor",
            (),
            {"PREFLIGHT": "on", "MIN_ALLREDUCE_GBPS": "1e6"},
            r"MIN_ALLREDUCE_GBPS=1e\+06; the same fault on 2 of 2 nodes",
        ),
        ("misspelt", ("train.stepz=3",), {}, r"train\.stepz"),
        (
            "refused",  # SLURM_GRES is an option of srun
            (),
            {"SLURM_GRES": "unicorn:1", "MAX_REQUEUES": "0"},
            "^Slurm did not start the checks: srun: error: .*Invalid generic resource",
        ),
    ],
)
def test_a_fault_of_every_node_fails_at_the_first_attempt(
    cluster, tmp_path, name, overrides, settings, reason
):
    """No node is excluded, and no step is trained."""
    run = Run(cluster, tmp_path, name)
    job = run.submit(*overrides, settings=settings)
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


def test_a_step_longer_than_the_lead_is_queued_again_before_the_limit(cluster, tmp_path):
    run = Run(cluster, tmp_path, "slow")
    # Slurm may send the signal up to a minute early; of two minutes, 30 s are left to reach step 3
    job = run.submit(options=("--time=2", "--signal=B:USR1@30"))
    with run.frozen_at(3):
        run.until_verdicts(1)
    cluster.call("scancel", job)
    (verdict,) = run.verdicts()
    assert (verdict["verdict"], verdict["queued_again"]) == ("stopped", True)
    assert "a longer --signal=B:USR1@SECONDS" in verdict["reason"]
