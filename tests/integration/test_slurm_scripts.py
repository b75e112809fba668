"""What a reader of the batch scripts relies on, without a cluster: headers, dry runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stable_opd_mcore.config.load import load_config
from tests.commands.plan.cases import QWEN_7B
from tests.integration.hosts import cannot_make_hosts, hosts

REPOSITORY = Path(__file__).parents[2]
SHARED = {"allocation.sh", "common.sh", "rank.sh", "servers.sh"}
BATCH = sorted(path for path in REPOSITORY.glob("slurm/*.sh") if path.name not in SHARED)


def dry_run(script: Path, *arguments: str, **settings: str) -> str:
    answer = subprocess.run(
        ["bash", str(script), "--dry-run", *arguments],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], **settings},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


ODD = ("data.system_prompt=Think first, then 'answer' in $5; ", 'run.name=a"b', "kl.beta=*", "x=\\")


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_a_script_begins_with_its_resources_and_prints_commands_that_work(path):
    head = path.read_text().splitlines()[:30]
    assert any(line.startswith("# Resources: ") for line in head)
    assert any("sbatch --nodes=" in line for line in head)
    assert any(line.startswith("#SBATCH --signal=B:USR1@") for line in head)
    printed = dry_run(path, *ODD, VENV="/shared/venv")
    line = next(line for line in printed.splitlines() if "-m stable_opd_mcore" in line)
    command = shlex.split(line)
    start = command.index("stable_opd_mcore")
    assert command[start - 2] == "/shared/venv/bin/python"
    assert tuple(command[-len(ODD) :]) == ODD
    if path.name != "report.sh":
        load_config(REPOSITORY / command[start + 2])


def test_a_dry_run_on_one_machine_prints_what_a_shell_reads_as_the_same_arguments():
    printed = dry_run(REPOSITORY / "launch/torchrun.sh", "train", "configs/smoke_cpu.yaml", *ODD)
    line = next(line for line in printed.splitlines() if "-m stable_opd_mcore" in line)
    assert tuple(shlex.split(line)[-len(ODD) :]) == ODD


def test_server_nodes_come_from_the_same_allocation(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    script = tmp_path / "six_nodes.sh"
    shipped = (REPOSITORY / "slurm" / "stable_opd_32b.sh").read_text()
    script.write_text(re.sub(r"--nodes=2$", "--nodes=6", shipped, flags=re.MULTILINE))
    overrides = (f"student.path={tmp_path}", "parallel.tensor=4", "rollout.sglang.tensor=4")
    venv = str(Path(sys.executable).parents[1])
    printed = dry_run(script, *overrides, SERVER_NODES="2", VENV=venv, PLAN="off")
    assert "# servers: 4 of tensor 4 on 2 nodes of their own, 2 a node; " in printed
    assert printed.count("stable_opd_mcore serve") == 2
    assert printed.count("++rollout.sglang.num_servers=2 ++rollout.sglang.tensor=4") == 2
    trainer = next(line for line in printed.splitlines() if "--job-name=trainer" in line)
    assert "--nodes=4 " in trainer
    for address in ("node5:22000", "node5:22001", "node6:22002", "node6:22003"):
        assert f"http://{address}" in trainer
    second = next(line for line in printed.splitlines() if "run.name=server_1" in line)
    assert "++rollout.sglang.host=node6 ++rollout.sglang.port=22002" in second


def test_an_option_goes_to_the_trainer_only():
    script = REPOSITORY / "slurm" / "stable_opd_32b.sh"
    printed = dry_run(script, "--accept-changes", "kl.beta=0.03", SERVER_NODES="1", VENV="/none")
    commands = [line for line in printed.splitlines() if line.startswith("srun ")]
    trainer, server = (command.split() for command in commands)
    assert "--accept-changes" in trainer
    assert "--accept-changes" not in server
    assert "kl.beta=0.03" in server


def test_a_dry_run_says_why_the_topology_is_not_known():
    venv = str(Path(sys.executable).parents[1])
    script = REPOSITORY / "slurm" / "stable_opd_7b.sh"
    printed = dry_run(script, "student.path=/nowhere", VENV=venv, PLAN="off")
    assert "# the topology is not known here: error: student.path=/nowhere" in printed


def test_more_servers_than_nodes_is_refused_with_the_sum():
    answer = subprocess.run(
        ["bash", "slurm/stable_opd_7b.sh", "--dry-run"],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "SERVER_NODES": "1"},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2
    assert "sbatch --nodes=2 or more" in answer.stdout


def test_a_container_replaces_the_virtual_environment():
    script = REPOSITORY / "slurm" / "stable_opd_7b.sh"
    printed = dry_run(script, CONTAINER_IMAGE="/images/opd.sqsh", VENV="/none")
    assert "--container-image=/images/opd.sqsh" in printed
    assert "rank.sh python3 -m stable_opd_mcore" in printed


def test_a_node_that_knows_itself_as_loopback_has_an_address_for_the_others():
    if reason := cannot_make_hosts():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    nodes = "TRAINER_NODES=(t1 t2) SERVER_NODE_NAMES=()"
    asked = f"{nodes}; for node in t1 t2 elsewhere; do address_of $node; done"
    with hosts(["t1", "t2"], own_name="127.0.1.1") as made:
        answer = subprocess.run(
            made[0].command("bash", "-c", f"source slurm/common.sh; {asked}"),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
    assert answer.stdout.split() == [made[0].address, made[1].address, "elsewhere"], answer.stderr
