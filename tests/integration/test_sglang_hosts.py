"""Two hosts that train and two that serve, and runs whose network connection is cut."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.hosts import Host, cannot_make_hosts, hosts
from tests.integration.sglang_tools import (
    LARGER,
    Process,
    assert_nothing_lost,
    events,
    external,
    needs_sglang,
    new_line,
    rows,
    serve,
    training_command,
    urls_of,
)

pytestmark = [needs_sglang, pytest.mark.cluster]
STEPS = 4


class Network:
    """The hosts, and the servers that `stable-opd serve` runs on two of them."""

    def __init__(self, directory: Path, made: list[Host], urls: list[str]) -> None:
        self.trainers, self.servers = made[:2], made[2:]
        self.urls = urls
        self.key_file = directory / "key"
        self.logs = [directory / host.name / "sglang/server_0.log" for host in self.servers]

    def settings(self, *overrides: str) -> tuple[str, ...]:
        """The overrides of a run over these servers."""
        return (
            *external(*self.urls),
            f"rollout.sglang.api_key_file={self.key_file}",
            f"train.steps={STEPS}",
            *LARGER,
            *overrides,
        )


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[Network]:
    if os.environ.get("CI") != "true" and (reason := cannot_make_hosts()):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("network")
    names = ["trainer-0", "trainer-1", "server-0", "server-1"]
    with hosts(names, gbit_per_second=0.1) as made:  # a sync takes a second
        settings = (f"rollout.sglang.api_key_file={directory / 'key'}", *LARGER)
        first, second = (
            serve(directory, host.name, f"rollout.sglang.host={host.address}", *settings, at=host)
            for host in made[2:]
        )
        with first, second:
            yield Network(directory, made, urls_of(first) + urls_of(second))


def test_trainers_and_servers_of_different_hosts_agree(tmp_path, network):
    """Two data-parallel ranks, a server each; the process group spans three hosts."""
    command = training_command(tmp_path, "apart", *network.settings())
    processes = [
        Process(
            host.command(*_torchrun(rank, network.trainers), *command[1:]),
            tmp_path / f"{host.name}.output",
        )
        for rank, host in enumerate(network.trainers)
    ]
    with processes[0], processes[1]:
        for process in processes:
            assert process.wait() == 0, process.text[-3000:]
    run = tmp_path / "apart"
    done = rows(run)
    assert len(done) == STEPS
    assert max(row["logprob/rollout_gap_max"] for row in done) < 1e-4
    assert min(row["engine/sync_bytes"] for row in done) > 0
    published = [event["detail"] for event in events(run)]
    assert published == [f"version {v}" for v in range(STEPS + 1) for _ in range(2)]


def test_only_the_key_opens_a_server_from_another_host(network):
    for url in network.urls:
        assert httpx.get(f"{url}/model_info").status_code == 401
        key = network.key_file.read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{url}/model_info", headers=headers).status_code == 200


def test_a_cable_pulled_out(tmp_path, network):
    """Pulled while a server generates and plugged in again: no step is lost. Pulled during a sync
    for good: a clear error, and a checkpoint of all finished steps.
    """
    run = tmp_path / "cable"
    timeouts = "stable_opd_mcore.serving.timeouts"
    short = (f"{timeouts}.START=4", f"{timeouts}.HEALTH_INTERVAL=3")
    settings = network.settings("checkpoint.every=0", *short)
    command = training_command(tmp_path, "cable", *settings)
    log = network.logs[1]
    with Process(network.trainers[0].command(*command), tmp_path / "output") as process:
        process.wait_until(lambda: len(rows(run)) >= 1, "the first step")
        process.wait_until(new_line(log, "Prefill batch"), "generation")
        _cable(network.servers[1], "down")
        # By the health probe, "hung", or by a request that opens a new connection, "timeout".
        process.wait_until(lambda: "server_1 failure: " in process.text, "it is noticed")
        _cable(network.servers[1], "up")

        process.wait_until(lambda: len(rows(run)) >= 2, "the second step")
        process.wait_until(new_line(log, "POST /update_weights_from"), "sync")
        _cable(network.servers[1], "down")
        assert process.wait() == 2, process.text[-3000:]
    assert "server_1 failure: weights did not arrive: " in process.text
    assert f"server_1 does not start: {network.urls[1]} did not answer in 4 s" in process.text
    assert "Traceback" not in process.text
    done = rows(run)
    assert 2 <= len(done) < STEPS
    assert [row["step"] for row in done] == list(range(1, len(done) + 1))
    assert_nothing_lost(run)
    checkpoints = [path.name for path in (run / "checkpoints").glob("step_*")]
    assert checkpoints == [f"step_{len(done):06d}"]


def _torchrun(rank: int, nodes: list[Host]) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}"),
        *("--nproc-per-node=1", f"--node-rank={rank}", f"--master-addr={nodes[0].name}"),
    ]


def _cable(host: Host, state: str) -> None:
    """`down` drops all packets from and to the host."""
    subprocess.run(host.command("ip", "link", "set", "eth0", state), check=True)
