"""What is loaded under the environment that servers and trainer get, from the real wheels.

The loader needs no GPU. What a process maps is compared by path, and the control runs without the
loader's cache, because a machine's /etc/ld.so.conf.d may know a CUDA toolkit of its own.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from stable_opd_mcore.serving.command import ServerOptions, server_environment

WHEELS = (  # of the cluster's stack; 600 MB
    "torch_memory_saver==0.0.10",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cudnn-cu13==9.24.0.43",
    "transformer_engine==2.20.2",  # its Python files only
)
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
FOREIGN = ("cu13/lib/libcudart.so.13", *(f"cudnn/lib/libcudnn{n}.so.9" for n in ("", "_graph")))
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not LOADER.exists(), reason="the wheels are for x86-64 Linux"),
]
# A part of cuDNN asks for another by its bare name.
MAPPED = """
import ctypes
ctypes.CDLL("libcudnn_graph.so.9")
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libcud" in line}, sep="\\n")
"""
# Transformer Engine's own search. Without torch and its core library it is not imported further.
ENGINE = "import transformer_engine.common as engine; engine._load_cuda_library('cudnn')"


@dataclass(frozen=True)
class Installed:
    """An environment with the wheels; another folder with a copy of some of their libraries."""

    python: Path
    own: Path  # site-packages/nvidia
    hook: Path
    foreign: Path
    driver: Path  # a folder with an empty libcuda.so.1, which the hook needs

    def shell(self, name: str) -> dict[str, str]:
        """The variables of the user's shell."""
        path = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(self.driver)}
        if name == "foreign":
            folders = [self.foreign, self.driver]
            path["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
            return path | dict.fromkeys(("CUDA_HOME", "CUDNN_HOME"), str(self.foreign))
        if name == "expandable":
            setting = "expandable_segments:True"
            return path | dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), setting)
        return path

    def run(self, environment: dict[str, str], *command: object) -> list[str]:
        answer = subprocess.run(
            [*map(str, command)], env=environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.splitlines()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    home = tmp_path_factory.mktemp("cuda")
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    python = home / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *WHEELS], check=True)
    (packages,) = (home / "venv/lib").glob("python3*/site-packages")
    (hook,) = packages.glob("*_preload_cu13.abi3.so")
    foreign, driver = home / "foreign", home / "driver"
    foreign.mkdir()
    for name in FOREIGN:
        shutil.copy(packages / "nvidia" / name, foreign)
    driver.mkdir()
    soname = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", driver / "libcuda.so.1"]
    subprocess.run(["cc", *soname, "-x", "c", os.devnull], check=True)
    yield Installed(python, packages / "nvidia", hook, foreign, driver)
    shutil.rmtree(home)


def own_files(installed: Installed, mapped: list[str]) -> set[str]:
    """The names of the mapped libraries of CUDA; all are the environment's own."""
    files = [Path(line) for line in mapped if not line.startswith(str(installed.driver))]
    assert all(file.is_relative_to(installed.own) for file in files), files
    return {file.name for file in files}


@pytest.mark.parametrize("shell", ["env -i", "foreign", "expandable"])
def test_servers_load_their_own_libraries(shell, installed):
    options = ServerOptions(str(installed.python), "", device="cuda", memory_saver=True)
    environment = server_environment(options, "key", installed.shell(shell))
    assert not [name for name in environment if "ALLOC_CONF" in name]
    below_hook = environment | {"LD_PRELOAD": str(installed.hook)}
    installed.run(below_hook, LOADER, "--inhibit-cache", "/bin/true")
    files = own_files(installed, installed.run(below_hook, installed.python, "-c", MAPPED))
    assert {"libcudart.so.13", "libcudnn_graph.so.9"} <= files


@pytest.mark.parametrize("shell", ["env -i", "foreign", "expandable"])
def test_the_trainer_loads_its_own_libraries(shell, installed):
    """Started by hand: no launcher sets anything."""
    environment = installed.shell(shell) | {
        "PYTHONPATH": str(Path.cwd()),
        "NVTE_PROJECT_BUILDING": "1",  # the import then loads nothing by itself
    }
    code = f"import stable_opd_mcore\n{ENGINE}\n{MAPPED}"
    files = own_files(installed, installed.run(environment, installed.python, "-c", code))
    assert {"libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9"} <= files


def test_without_that_environment_the_wrong_library_is_loaded_or_none(installed):
    below_hook = installed.shell("env -i") | {"LD_PRELOAD": str(installed.hook)}
    command = [str(LOADER), "--inhibit-cache", "/bin/true"]
    answer = subprocess.run(command, env=below_hook, capture_output=True, text=True)
    assert answer.returncode == 127
    assert "libcudart.so.13" in answer.stderr
    environment = installed.shell("foreign") | {"NVTE_PROJECT_BUILDING": "1"}
    mapped = installed.run(environment, installed.python, "-c", f"{ENGINE}\n{MAPPED}")
    assert str(installed.foreign / "libcudnn.so.9") in mapped
