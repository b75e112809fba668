"""The checks of a node, run as common.sh runs them, each with the fault it is there to find."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONFIG = "configs/smoke_cpu.yaml"


def check_node(notes: Path, *options: str, name: str = "n1") -> None:
    (notes / "token").write_text("7.0\n")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    arguments = ["--token=7.0", f"--port={port}", "--head=n1", *options]
    arguments += ["--", CONFIG, f"run.directory={notes}"]
    subprocess.run(
        [sys.executable, "slurm/preflight.py", "node", str(notes), *arguments],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "SLURMD_NODENAME": name,
            "PYTHONPATH": str(REPOSITORY),
            "PATH": "/nowhere",  # also a machine with GPUs has none here
        },
        timeout=120,
    )


def test_a_good_node_says_so_and_where_the_run_will_be(tmp_path):
    check_node(tmp_path)
    assert (tmp_path / "n1.good").exists()
    assert (tmp_path / "run_directory").read_text() == str(tmp_path / "smoke_cpu")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--min-free-gib=1e9"], "GiB free at"),
        (["--gpus=8"], "no nvidia-smi"),
    ],
)
def test_a_bad_node_says_why(options, fault, tmp_path):
    check_node(tmp_path, *options)
    assert fault in (tmp_path / "n1.bad").read_text()
    assert not (tmp_path / "n1.good").exists()


def test_other_versions_than_the_head_node(tmp_path):
    check_node(tmp_path)
    versions = (tmp_path / "n1.versions").read_text()
    (tmp_path / "n1.versions").write_text(versions.replace("torch ", "torch 0."))
    check_node(tmp_path, name="n2")
    assert "but torch 0." in (tmp_path / "n2.bad").read_text()


def test_a_file_system_that_is_not_shared_leaves_no_note(tmp_path):
    check_node(tmp_path, "--token=another")
    assert not list(tmp_path.glob("n1.*"))


def test_a_taken_port(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        check_node(tmp_path, f"--port={taken.getsockname()[1]}")
    assert "for the rendezvous" in (tmp_path / "n1.bad").read_text()


def test_a_slow_network_is_measured_and_its_nodes_named(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "slurm/preflight.py", "network", str(tmp_path), "--floor=1e6"],
            cwd=REPOSITORY,
            env=os.environ
            | {
                "PYTHONPATH": str(REPOSITORY),
                "SLURMD_NODENAME": f"n{rank + 1}",
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for node in ("n1", "n2"):
        assert "GB/s, floor 1e+06" in (tmp_path / f"{node}.network_bad").read_text()
