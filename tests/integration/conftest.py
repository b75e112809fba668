"""What integration tests share: one Slurm cluster for the whole session."""

import os

import pytest

from tests.integration.slurm_cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Three nodes. Without Slurm's programs the tests are skipped, under CI they fail."""
    if missing := missing_programs():
        reason = f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), num_nodes=3) as running:
        yield running
