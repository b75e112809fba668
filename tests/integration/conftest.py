"""What integration tests share: a Slurm cluster."""

import os

import pytest

from tests.integration.hosts import cannot_make_hosts, hosts
from tests.integration.slurm_cluster import SlurmCluster, missing_programs, nodes_here, nodes_on

NAMES = ("n1", "n2", "n3")
ASIDE = ("n4", "n5", "n6")
WHERE = pytest.StashKey[str]()


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    """Three nodes and three aside, each a host of its own. Without Slurm's programs the tests are
    skipped; where no hosts can be made, all nodes are this machine. Under CI both are failures.

    Each file has its own cluster, so that a job still running there after a file disturbs no other.
    """
    in_ci = os.environ.get("CI") == "true"
    if missing := missing_programs():
        reason = f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
        if in_ci:
            pytest.fail(reason)
        pytest.skip(reason)
    directory, no_hosts = tmp_path_factory.mktemp("slurm"), cannot_make_hosts()
    if no_hosts and in_ci:
        pytest.fail(no_hosts)
    if no_hosts:
        request.config.stash[WHERE] = f"this machine ({no_hosts})"
        with SlurmCluster(directory, nodes_here(NAMES), nodes_here(ASIDE)) as running:
            yield running
    else:
        request.config.stash[WHERE] = "a host of its own"
        with hosts((*NAMES, *ASIDE), own_name="127.0.1.1") as made:
            nodes = nodes_on(made)
            count = len(NAMES)
            with SlurmCluster(directory, nodes[:count], nodes[count:]) as running:
                yield running


def pytest_terminal_summary(terminalreporter):
    if where := terminalreporter.config.stash.get(WHERE, ""):
        terminalreporter.write_line(f"Each Slurm node was {where}.")
