"""What limits a process, and what is on the GPUs; nvidia-smi and control groups are stand-ins."""

import os

import pytest

from stable_opd_mcore.host import machine_share
from stable_opd_mcore.host.cuda_driver import Driver
from stable_opd_mcore.host.machine_share import gpu_faults, machine_faults, memory_limit
from tests.host.nvidia_smi import write_nvidia_smi

GIB = 2**30
EIGHT = Driver("580.95.05", "13.0", 8)


def test_a_shell_with_too_few_cores_or_too_little_memory_is_named():
    faults = dict(machine_faults(8, cores=2, memory_bytes=8 * GIB))
    assert "may use 2 of" in faults["cores"]
    assert "8 GPUs need at least 16" in faults["cores"]
    assert "may use 8 GiB of host memory" in faults["host memory"]
    assert not dict(machine_faults(8, cores=16, memory_bytes=128 * GIB))


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/job/step", {"job/memory.max": "64", "job/step/memory.max": "max"}, 64),
        ("0::/job/step", {"memory.max": "9", "job/memory.max": "64"}, 9),
        ("5:cpu,cpuacct:/job\n4:memory:/job", {"memory/job/memory.limit_in_bytes": "32"}, 32),
        ("0::/", {}, None),
        (None, {}, None),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(membership, files, limit, tmp_path):
    if membership:
        (tmp_path / "cgroup").write_text(membership + "\n")
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path / "fs") == limit


@pytest.mark.parametrize(
    ("state", "visible", "kinds"),
    [
        ("0, GPU-a, 612, Default, Disabled", None, set()),
        ("0, GPU-a, [N/A], Default, [N/A]", None, set()),
        ("0, GPU-a, 62700, Default, Disabled", None, {"gpu memory in use"}),
        ("0, GPU-a, 62700, Default, Disabled\n1, GPU-b, 4, Default, Disabled", "1", set()),
        ("0, GPU-a, 62700, Default, Disabled\n1, GPU-b, 4, Default, Disabled", "GPU-b", set()),
        ("0, GPU-a, 4, Exclusive_Process, Disabled", None, {"compute mode"}),
        ("0, GPU-a, 4, Default, Enabled", None, {"MIG mode"}),
        ('Field "mig.mode.current" is not a valid field to query.', None, set()),
    ],
)
def test_what_keeps_a_run_from_the_gpus_is_named(state, visible, kinds, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_share, "_PATIENCE_SECONDS", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    write_nvidia_smi(tmp_path, EIGHT, state)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    faults = gpu_faults(colocated=True)
    assert faults.keys() == kinds
    assert all("GPU 0" in line for line in faults.values())
    assert gpu_faults(colocated=False).keys() == kinds - {"compute mode"}


def test_memory_that_is_being_given_back_is_waited_for(tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, EIGHT, "0, GPU-a, 62700, Default, Disabled")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    free = "0, GPU-a, 4, Default, Disabled"
    monkeypatch.setattr(
        machine_share.time, "sleep", lambda _: write_nvidia_smi(tmp_path, EIGHT, free)
    )
    assert gpu_faults(colocated=True) == {}
