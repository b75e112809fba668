"""Each check of a node with a fault that it must find, run as common.sh runs it."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONFIG = "configs/smoke_cpu.yaml"


def check_node(
    notes: Path,
    *options: str,
    name: str = "n1",
    settings: tuple[str, ...] = (),
    **variables: str,
) -> dict[str, str]:
    """Check a node; its faults."""
    (notes / "token").write_text("7.0\n")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    arguments = ["--token=7.0", f"--port={port}", "--head=n1", *options]
    arguments += ["--", CONFIG, f"run.directory={notes}", *settings]
    command = [sys.executable, "slurm/preflight.py", "node", str(notes), *arguments]
    subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ
        | {
            "SLURMD_NODENAME": name,
            "PYTHONPATH": str(REPOSITORY),
            "PATH": "/nowhere",  # hides the nvidia-smi of a machine with GPUs
        }
        | variables,
        timeout=120,
    )
    bad = notes / f"{name}.bad"
    return json.loads(bad.read_text()) if bad.exists() else {}


def test_a_good_node_also_reports_the_run_directory(tmp_path):
    assert not check_node(tmp_path, "--min-free-gib=0.01")
    assert (tmp_path / "n1.good").exists()
    assert (tmp_path / "run_directory").read_text() == str(tmp_path / "smoke_cpu")


@pytest.mark.parametrize(
    ("option", "kind", "message"),
    [
        ("--min-free-gib=1e9", "disk space", "GiB free at"),
        ("--gpus=8", "driver", "no nvidia-smi"),
    ],
)
def test_a_bad_node_reports_its_fault(option, kind, message, tmp_path):
    assert message in check_node(tmp_path, option)[kind]
    assert not (tmp_path / "n1.good").exists()


OLD_DRIVER = """#!/bin/bash
for field in clocks_event_reasons.hw_slowdown clocks_event_reasons.hw_power_brake_slowdown; do
  case $1 in *$field*) echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;; esac
done
echo "0, 0, No, 0, $REMAPPING, Not Active"
"""


def test_a_field_that_an_old_driver_does_not_know_is_left_out(tmp_path):
    (tmp_path / "nvidia-smi").write_text(OLD_DRIVER)
    (tmp_path / "nvidia-smi").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/bin", "SLURM_GPUS_ON_NODE": "2"}
    for none in ("No", "0"):  # of remapped rows
        assert check_node(tmp_path, "--gpus=1", REMAPPING=none, **variables) == {}
    faults = check_node(tmp_path, "--gpus=2", REMAPPING="Yes", **variables)
    assert faults == {
        "gpu lost": "1 GPUs, RANKS_PER_NODE=2",
        "gpu remapped_rows.failure": "GPU 0: remapped_rows.failure is Yes",
    }


def test_a_node_with_other_versions_than_the_head_node_is_bad(tmp_path):
    check_node(tmp_path)
    versions = (tmp_path / "n1.versions").read_text()
    (tmp_path / "n1.versions").write_text(versions.replace("torch ", "torch 0."))
    assert "but torch 0." in check_node(tmp_path, name="n2")["version of torch"]


def servers_environment(directory: Path, **versions: str) -> tuple[str, str]:
    """Settings for SGLang servers whose interpreter lists these versions."""
    installed = {
        "python": "3.12.3",
        "torch": "2.14.1",
        "nvidia-nccl-*": "absent",  # as in the environment of the tests
        "transformer-engine": "absent",
        "megatron-core": "absent",
        "sglang": "0.5.23",
        "transformers": "5.19.0",
        "numpy": "2.4.6",
    } | versions
    python = directory / "python"
    lines = "\n".join(f"{name} {version}" for name, version in installed.items())
    python.write_text(f"#!/bin/bash\necho '{lines}'\n")
    python.chmod(0o755)
    return "rollout.engine=sglang", f"rollout.sglang.python={python}"


@pytest.mark.parametrize(
    ("versions", "kind", "words"),
    [
        (
            {"nvidia-nccl-*": "2.30.7"},
            "servers' nccl",
            ["NCCL absent (torch ", "2.30.7 (torch 2.14.1)", "requirements/cluster.toml"],
        ),
        ({"sglang": "0.5.22"}, "servers' sglang", ["runs SGLang 0.5.22; 0.5.23 or later"]),
        ({"sglang": "absent"}, "servers' sglang", ["has no SGLang"]),
    ],
)
def test_servers_that_cannot_work_with_the_trainer_are_a_fault(versions, kind, words, tmp_path):
    settings = servers_environment(tmp_path, **versions)
    message = check_node(tmp_path, settings=settings)[kind]
    assert all(word in message for word in words), message


def test_the_servers_environments_of_the_nodes_are_compared(tmp_path):
    settings = servers_environment(tmp_path)
    assert not check_node(tmp_path, settings=settings)
    assert "servers: torch 2.14.1" in (tmp_path / "n1.versions").read_text().splitlines()
    servers_environment(tmp_path, torch="2.11.0")
    faults = check_node(tmp_path, name="n2", settings=settings)
    message = "servers: torch 2.11.0, but servers: torch 2.14.1 on n1"
    assert faults == {"version of servers: torch": message}
    missing = check_node(tmp_path, "--servers=n3", settings=("rollout.sglang.python=/none",))
    assert "rollout.sglang.python=/none" in missing["servers' python"]


def test_what_servers_compile_with_is_there_or_named_with_the_remedy(tmp_path):
    settings = servers_environment(tmp_path)
    toolkit = tmp_path / "cuda"
    variables = {"PATH": str(tmp_path), "CUDA_HOME": str(toolkit), "REMAPPING": "No"}
    variables["CXX"] = "no-compiler"
    (tmp_path / "nvidia-smi").write_text(OLD_DRIVER)
    (tmp_path / "nvidia-smi").chmod(0o755)
    message = check_node(tmp_path, "--gpus=1", settings=settings, **variables)["servers' compiler"]
    python = tmp_path / "python"
    for words in (
        f"without nvcc in {toolkit}/bin: install the CUDA toolkit",
        f"without libcudart.so in {toolkit}/lib64",
        "without the C++ compiler no-compiler: install g++",
        f"without ninja: {python} -m pip install ninja",
    ):
        assert words in message
    (tmp_path / "n1.bad").unlink()
    assert not check_node(tmp_path, "--gpus=1", "--servers=n3", settings=settings, **variables)
    for file in ("cuda/bin/nvcc", "cuda/lib64/libcudart.so", "ninja", "no-compiler"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch(0o755)
    assert not check_node(tmp_path, "--gpus=1", "--servers=n1", settings=settings, **variables)


def test_a_node_without_the_shared_file_system_leaves_no_note(tmp_path):
    check_node(tmp_path, "--token=another")
    assert not list(tmp_path.glob("n1.*"))


def test_a_taken_port_is_a_fault(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        faults = check_node(tmp_path, f"--port={taken.getsockname()[1]}")
    assert "for the rendezvous" in faults["port"]


def test_a_slow_network_is_named_with_its_speed(tmp_path):
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
    message = (tmp_path / "network_bad").read_text()
    assert re.match(r"all-reduce over 2 ranks: [0-9.]+ GB/s, MIN_ALLREDUCE_GBPS=1e\+06: ", message)
    assert not (tmp_path / "network_good").exists()
