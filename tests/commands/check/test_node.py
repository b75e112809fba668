"""Each fault of a machine is named with its remedy. Interpreters, nvidia-smi and compilers are
stand-ins, but for one run that imports the installed torch."""

import json
import os
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.commands.check import node
from stable_opd_mcore.host.cuda_driver import Driver
from stable_opd_mcore.host.cuda_libraries import TOO_SLOW, Report
from tests.host.nvidia_smi import write_nvidia_smi

HEALTHY = Report(
    torch="2.14.1",
    cuda="13.0",
    num_gpus=8,
    python_header="/usr/include/python3.12/Python.h",
    has_python_header=True,
    glibc="2.39",
)
NVCC = "echo Cuda compilation tools, release {}, V{}.88"


def program(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """Checks a node whose servers' environment reports this; returns its faults."""
    write_nvidia_smi(tmp_path, Driver("580.95.05", "13.0", 8))
    monkeypatch.setattr(node, "machine_faults", lambda _: ())  # this machine's, not the node's
    for name in ("gcc", "c++", "ninja"):
        program(tmp_path / name, "")
    program(tmp_path / "cuda/bin/nvcc", NVCC.format("13.0", "13.0"))
    (tmp_path / "cuda/lib64").mkdir()
    (tmp_path / "cuda/lib64/libcudart.so").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in {"CUDA_HOME": str(tmp_path / "cuda"), "CC": "gcc", "CXX": "c++"}.items():
        monkeypatch.setenv(name, value)

    def check(report: Report) -> node.Faults:
        line = shlex.quote(json.dumps(asdict(report)))
        servers = program(tmp_path / "servers/bin/python", f"echo {line}")
        return node.node_faults(False, servers, colocated=True)

    return check


def test_a_healthy_node_has_no_fault(faults):
    assert faults(HEALTHY) == {}


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"num_gpus": 0, "no_gpu_reason": "Error 802"}, "gpu unusable", ["nvidia-fabricmanager"]),
        ({"import_error": "the process failed: libcudart.so.13: cannot open"}, "servers' imports",
         ["libcudart.so.13: cannot open; install", "docs/cluster.md"]),
        ({"import_error": "OSError: libcuda.so.1: cannot open shared object file"},
         "servers' imports", ["the driver's library is not where the loader looks: run ldconfig"]),
        ({"import_error": f"{TOO_SLOW} torch took 300 s"}, "servers' imports",
         ["torch took 300 s; start it again"]),
        ({"import_error": "ModuleNotFoundError: No module named 'sgl_kernel'"}, "servers' imports",
         ["No module named 'sgl_kernel'; install its environment again"]),
        ({"foreign": ["/opt/cudnn/lib/libcudnn.so.9"]}, "servers' libraries",
         ["loads /opt/cudnn/lib/libcudnn.so.9 and has its own", "LD_LIBRARY_PATH=/opt/cudnn"]),
        ({"has_python_header": False}, "servers' Python.h", ["install python3.12-dev (apt)"]),
        ({"glibc": "2.28"}, "servers' glibc", ["glibc 2.28", "need 2.34", "CONTAINER_IMAGE"]),
    ],
)  # fmt: skip
def test_a_fault_of_an_environment_is_named(changes, kind, words, faults, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cudnn/lib")
    (found,) = faults(replace(HEALTHY, **changes)).items()
    assert found[0] == kind
    assert "\n" not in found[1]
    assert all(word in found[1] for word in words), found[1]


@pytest.mark.parametrize(
    ("broken", "script", "kind", "words"),
    [
        ("gcc", None, "C compiler", ["no C compiler gcc", "install gcc, or set CC"]),
        ("c++", None, "servers' compiler", ["the C++ compiler c++: install g++"]),
        ("c++", "echo unrecognized -std=c++20; exit 1", "servers' C++", ["g++ 10 or later"]),
        ("cuda/bin/nvcc", None, "servers' compiler", ["nvcc in ", "set CUDA_HOME"]),
        ("cuda/lib64/libcudart.so", None, "servers' compiler", ["libcudart.so in "]),
        ("ninja", None, "servers' compiler", ["-m pip install ninja"]),
        ("cuda/bin/nvcc", NVCC.format("12.8", "12.8"), "servers' toolkit",
         ["is 12.8, and torch is built for CUDA 13.0", "set CUDA_HOME to it"]),
        ("cuda/bin/nvcc",
         "[ $1 = --version ] || { echo '#error -- unsupported GNU version!'; exit 1; }",
         "servers' kernels",
         ["(#error -- unsupported GNU version!)", "a g++ that it takes first in PATH"]),
    ],
)  # fmt: skip
def test_what_servers_compile_with_is_there_or_named(
    broken, script, kind, words, faults, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))  # without the machine's own compilers
    (tmp_path / broken).unlink() if script is None else program(tmp_path / broken, script)
    found = faults(HEALTHY)
    assert list(found) == [kind]
    assert all(word in found[kind] for word in words), found


def test_what_is_on_the_gpus_already_is_named_too(faults, tmp_path):
    states = "0, GPU-a, 70000, Default, Disabled\n1, GPU-b, 4, Exclusive_Process, Disabled"
    write_nvidia_smi(tmp_path, Driver("580.95.05", "13.0", 2), states)
    assert set(faults(HEALTHY)) == {"gpu memory in use", "compute mode"}


def test_the_trainers_own_environment_is_read_by_importing_it(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("torch can use the GPUs")
    write_nvidia_smi(tmp_path, Driver("570.86.15", "12.8", 8))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = node.node_faults(True, None, colocated=False)
    assert "driver 570.86.15" in found["gpu unusable"]
    assert torch.__version__ in found["gpu unusable"]
    assert not {"trainer's imports", "trainer's libraries"} & found.keys()
