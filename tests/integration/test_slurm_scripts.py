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
from tests.integration.hosts import cannot_make_hosts, hosts
from tests.planning.cases import QWEN_7B

REPOSITORY = Path(__file__).parents[2]
SHARED = {"common.sh", "rank.sh", "servers.sh"}
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


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_resources_and_how_to_change_them_come_first(path):
    head = path.read_text().splitlines()[:30]
    assert any(line.startswith("# Resources: ") for line in head)
    assert any("sbatch --nodes=" in line for line in head)
    assert any(line.startswith("#SBATCH --signal=B:USR1@") for line in head)


TRAINING = [path for path in BATCH if path.name != "report.sh"]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_a_dry_run_prints_commands_with_a_config_that_loads(path):
    printed = dry_run(path, "train.steps=3", "run.name=x", VENV="/shared/venv")
    command = next(line for line in printed.splitlines() if "rank.sh" in line).split()
    start = command.index("stable_opd_mcore")
    assert command[start - 2] == "/shared/venv/bin/python"
    config, overrides = command[start + 2], command[start + 3 :]
    assert overrides[:2] == ["train.steps=3", "run.name=x"]
    assert load_config(REPOSITORY / config, overrides[:2]).train.steps == 3


ODD = ("data.system_prompt=Think first, then 'answer' in $5; ", 'run.name=a"b', "kl.beta=*", "x=\\")


@pytest.mark.parametrize(
    "path", [*BATCH, REPOSITORY / "launch" / "torchrun.sh"], ids=lambda path: path.name
)
def test_a_dry_run_prints_what_a_shell_reads_as_the_same_arguments(path):
    command = ["train", "configs/smoke_cpu.yaml"] if path.name == "torchrun.sh" else []
    printed = dry_run(path, *command, *ODD)
    line = next(line for line in printed.splitlines() if "-m stable_opd_mcore" in line)
    assert tuple(shlex.split(line)[-len(ODD) :]) == ODD


def test_server_nodes_come_from_the_same_allocation(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    script = tmp_path / "six_nodes.sh"
    shipped = (REPOSITORY / "slurm" / "stable_opd_32b.sh").read_text()
    script.write_text(re.sub(r"--nodes=2$", "--nodes=6", shipped, flags=re.MULTILINE))
    overrides = (f"student.path={tmp_path}", "parallel.tensor=4", "rollout.sglang.tensor=4")
    venv = str(Path(sys.executable).parents[1])
    printed = dry_run(script, *overrides, SERVER_NODES="2", VENV=venv)
    assert "# servers: 4 of tensor 4 on 2 nodes of their own, 2 a node; " in printed
    assert printed.count("stable_opd_mcore serve") == 2
    assert printed.count("rollout.sglang.num_servers=2 rollout.sglang.tensor=4") == 2
    trainer = next(line for line in printed.splitlines() if "--job-name=trainer" in line)
    assert "--nodes=4 " in trainer
    for address in ("node5:22000", "node5:22001", "node6:22002", "node6:22003"):
        assert f"http://{address}" in trainer
    second = next(line for line in printed.splitlines() if "run.name=server_1" in line)
    assert "rollout.sglang.host=node6 rollout.sglang.port=22002" in second


def test_an_option_is_the_trainer_s_alone():
    script = REPOSITORY / "slurm" / "stable_opd_32b.sh"
    printed = dry_run(script, "--accept-changes", "kl.beta=0.03", SERVER_NODES="1")
    commands = [line for line in printed.splitlines() if line.startswith("srun ")]
    trainer, server = (command.split() for command in commands)
    assert "--accept-changes" in trainer
    assert "--accept-changes" not in server
    assert "kl.beta=0.03" in server


def test_a_dry_run_says_why_the_topology_is_not_known():
    printed = dry_run(REPOSITORY / "slurm" / "stable_opd_7b.sh", "student.path=/nowhere")
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
    printed = dry_run(script, CONTAINER_IMAGE="/images/opd.sqsh")
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
