"""Each check of a node with a fault that it must find, run as common.sh runs it."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import preflight
import pytest

from stable_opd_mcore.commands.check.node import node_faults
from tests.parallel.launch import start_process

# The trainer's: a torch for CUDA brings it, a CPU build does not.
NCCL = preflight.versions_in(sys.executable)["nvidia-nccl-*"]
CONFIG = str(Path(__file__).parents[2] / "configs/smoke_cpu.yaml")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def check_node(monkeypatch, tmp_path):
    """Checks a node; returns its faults."""

    def check(*options: str, name: str = "n1", settings: tuple[str, ...] = (), **variables: str):
        (tmp_path / "token").write_text("7.0\n")
        if preflight.node_faults is node_faults:  # tests/commands/check/test_node.py has its cases
            monkeypatch.setattr(preflight, "node_faults", lambda *_: {})
        monkeypatch.setenv("PATH", "/nowhere")  # hides the nvidia-smi of a machine with GPUs
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        arguments = ["--token=7.0", f"--port={free_port()}", "--head=n1", *options]
        arguments += ["--", CONFIG, f"run.directory={tmp_path}", *settings]
        monkeypatch.setattr("sys.argv", ["preflight.py", "node", str(tmp_path), *arguments])
        preflight.check_node(preflight.parse_arguments(), name)
        bad = tmp_path / f"{name}.bad"
        return json.loads(bad.read_text()) if bad.exists() else {}

    return check


def test_a_good_node_also_reports_the_run_directory(check_node, tmp_path):
    assert not check_node("--min-free-gib=0.01")
    assert (tmp_path / "n1.good").exists()
    assert (tmp_path / "run_directory").read_text() == str(tmp_path / "smoke_cpu")


@pytest.mark.parametrize(
    ("option", "kind", "message"),
    [
        ("--min-free-gib=1e9", "disk space", "GiB free at"),
        ("--gpus=8", "driver", "no nvidia-smi"),
    ],
)
def test_a_bad_node_reports_its_fault(check_node, option, kind, message, tmp_path):
    assert message in check_node(option)[kind]
    assert not (tmp_path / "n1.good").exists()


OLD_DRIVER = """#!/bin/bash
for field in clocks_event_reasons.hw_slowdown clocks_event_reasons.hw_power_brake_slowdown; do
  case $1 in *$field*) echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;; esac
done
echo "0, 0, No, 0, $REMAPPING, Not Active"
"""


def test_a_field_that_an_old_driver_does_not_know_is_left_out(check_node, tmp_path):
    (tmp_path / "nvidia-smi").write_text(OLD_DRIVER)
    (tmp_path / "nvidia-smi").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/bin", "SLURM_GPUS_ON_NODE": "2"}
    for none in ("No", "0"):  # no remapped row
        assert check_node("--gpus=1", REMAPPING=none, **variables) == {}
    faults = check_node("--gpus=2", REMAPPING="Yes", **variables)
    assert faults == {
        "gpu lost": "1 GPUs, RANKS_PER_NODE=2",
        "gpu remapped_rows.failure": "GPU 0: remapped_rows.failure is Yes",
    }


def test_a_node_with_other_versions_than_the_head_node_is_bad(check_node, tmp_path):
    check_node()
    versions = (tmp_path / "n1.versions").read_text()
    (tmp_path / "n1.versions").write_text(versions.replace("torch ", "torch 0."))
    assert "but torch 0." in check_node(name="n2")["version of torch"]


def servers_environment(directory: Path, **versions: str) -> tuple[str, str]:
    """Settings for SGLang servers whose interpreter lists these versions."""
    installed = {
        "python": "3.12.3",
        "torch": "2.14.1",
        "nvidia-nccl-*": NCCL,
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
            {"nvidia-nccl-*": "2.0.1"},
            "servers' nccl",
            [f"NCCL {NCCL} (torch ", "2.0.1 (torch 2.14.1)", "requirements/cluster.toml"],
        ),
        ({"sglang": "0.5.22"}, "servers' sglang", ["runs SGLang 0.5.22; 0.5.23 or later"]),
        ({"sglang": "absent"}, "servers' sglang", ["has no SGLang"]),
    ],
)
def test_servers_that_cannot_work_with_the_trainer_are_a_fault(
    check_node, versions, kind, words, tmp_path
):
    settings = servers_environment(tmp_path, **versions)
    message = check_node(settings=settings)[kind]
    assert all(word in message for word in words), message


def test_the_servers_environments_of_the_nodes_are_compared(check_node, tmp_path):
    settings = servers_environment(tmp_path)
    assert not check_node(settings=settings)
    assert "servers: torch 2.14.1" in (tmp_path / "n1.versions").read_text().splitlines()
    servers_environment(tmp_path, torch="2.11.0")
    faults = check_node(name="n2", settings=settings)
    message = "servers: torch 2.11.0, but servers: torch 2.14.1 on n1"
    assert faults == {"version of servers: torch": message}
    missing = check_node("--servers=n3", settings=("rollout.sglang.python=/none",))
    assert "rollout.sglang.python=/none" in missing["servers' python"]


def test_each_node_is_checked_for_what_it_runs(check_node, monkeypatch, tmp_path):
    engine, python = servers_environment(tmp_path)
    servers = python.partition("=")[2]
    asked = []
    monkeypatch.setattr(preflight, "node_faults", lambda *what: asked.append(what) or {"C++": "no"})
    (tmp_path / "nvidia-smi").write_text(OLD_DRIVER)
    (tmp_path / "nvidia-smi").chmod(0o755)

    def faults(*options, name="n1", settings=(engine, python)):
        path = {"PATH": f"{tmp_path}:/bin", "REMAPPING": "No"}
        return check_node("--gpus=1", *options, name=name, settings=settings, **path)

    assert faults() == {"C++": "no"}
    faults("--servers=n3")
    faults("--servers=n3", name="n3")
    faults(settings=(engine, python, "rollout.sglang.placement=colocated"))
    faults(settings=())
    assert asked == [
        (True, servers, False),
        (True, None, False),
        (False, servers, False),
        (True, servers, True),
        (True, None, False),
    ]


def test_a_node_without_the_shared_file_system_leaves_no_note(check_node, tmp_path):
    check_node("--token=another")
    assert not list(tmp_path.glob("n1.*"))


def test_a_taken_port_is_a_fault(check_node, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        faults = check_node(f"--port={taken.getsockname()[1]}")
    assert "at which the ranks meet" in faults["port"]


def test_a_setting_that_does_not_exist_is_left_for_the_batch_script(check_node, tmp_path):
    check_node(settings=("train.stepz=3",))
    assert "train.stepz" in (tmp_path / "config_error").read_text()
    assert not list(tmp_path.glob("n1.*"))


def test_a_slow_network_is_named_with_its_speed(tmp_path):
    port = free_port()
    ranks = [start_process(measure, rank, port, tmp_path) for rank in range(2)]
    for process in ranks:
        process.join(timeout=120)
    assert [process.exitcode for process in ranks] == [0, 0]
    message = (tmp_path / "network_bad").read_text()
    assert re.match(r"all-reduce over 2 ranks: [0-9.]+ GB/s, MIN_ALLREDUCE_GBPS=1e\+06: ", message)
    assert not (tmp_path / "network_good").exists()


def measure(rank: int, port: int, notes: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    preflight.check_network(notes, floor=1e6)
