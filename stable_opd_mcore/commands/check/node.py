"""Whether this machine can run trainer and servers: driver, GPUs, libraries, compilers.

    .venv/bin/python -m stable_opd_mcore.commands.check.node     # what is wrong, or "ready"

Each fault is one line that says what is wrong, what was expected and what to do. slurm/preflight.py
checks every node of a job with the same functions, and `make gpu` its machine. Not here: the health
of GPUs, disks, ports and versions between nodes (slurm/preflight.py), settings (checklist.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host import cuda_libraries
from stable_opd_mcore.host.cuda_driver import Driver, find_driver, unusable_gpus
from stable_opd_mcore.host.cuda_libraries import SGLANG_KERNELS, TOO_SLOW, Report, read_report
from stable_opd_mcore.host.kernel_compilers import Faults, compiler_faults
from stable_opd_mcore.host.machine_share import gpu_faults, machine_faults, visible_gpus
from stable_opd_mcore.host.releases import release_numbers
from stable_opd_mcore.serving.command import ServerOptions, server_environment

_IMPORT_SECONDS = 300  # torch and Transformer Engine from a cold shared file system
_GLIBC = (2, 34)  # that SGLang's wheels are built for
_PROGRAM = cuda_libraries.__file__
_LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH")


def node_faults(trains: bool, servers_python: str | None, colocated: bool) -> Faults:
    """What keeps this machine's GPUs from being used.

    Args:
        trains: whether the trainer runs here, with this interpreter.
        servers_python: the servers' interpreter, `rollout.sglang.python`; None: none run here.
        colocated: whether they start under the memory saver's hook.
    """
    try:
        driver = find_driver()
    except UserError as error:
        return {"driver": str(error)}
    faults: Faults = {}
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), "gcc")
    if shutil.which(compiler) is None:
        line = f"no C compiler {compiler}, with which Triton compiles: install gcc, or set CC"
        faults["C compiler"] = line
    with ThreadPoolExecutor() as pool:  # both import torch, from a file system that may be cold
        trainer = pool.submit(_trainer_report) if trains else None
        servers = servers_python and pool.submit(_servers_report, servers_python, colocated)
    if driver is not None:
        faults |= machine_faults(len(visible_gpus()) or driver.num_gpus)
        faults |= gpu_faults(colocated)
    if trainer:
        faults |= _common_faults("trainer's", sys.executable, trainer.result(), driver)
    if servers_python and servers:
        faults |= _server_faults(servers_python, servers.result(), driver)
        variables = _servers_environment(servers_python, colocated)
        faults |= compiler_faults(servers_python, servers.result().cuda, variables)
    return faults


def _trainer_report() -> Report:
    """Imports through this package, whose import hook Transformer Engine passes in a run too."""
    engine = ["transformer_engine.pytorch"] if find_spec("transformer_engine") else []
    command = [sys.executable, "-m", "stable_opd_mcore.host.cuda_libraries"]
    return read_report(command, ["torch", *engine], dict(os.environ), _IMPORT_SECONDS)


def _servers_report(python: str, colocated: bool) -> Report:
    command = [python, "-P", _PROGRAM, *(["--memory-saver"] if colocated else [])]
    environment = _servers_environment(python, colocated)
    return read_report(command, ["torch", SGLANG_KERNELS], environment, _IMPORT_SECONDS)


def _servers_environment(python: str, colocated: bool) -> dict[str, str]:
    options = ServerOptions(python, model="", device="cuda", memory_saver=colocated)
    return server_environment(options, "", os.environ)


def _server_faults(python: str, report: Report, driver: Driver | None) -> Iterator[tuple[str, str]]:
    yield from _common_faults("servers'", python, report, driver)
    if report.glibc and release_numbers(report.glibc, 2) < _GLIBC:
        needed = ".".join(map(str, _GLIBC))
        yield (
            "servers' glibc",
            f"glibc {report.glibc}: SGLang's wheels need {needed}; use a container "
            "(CONTAINER_IMAGE) or a newer system, such as Ubuntu 22.04 or RHEL 9",
        )


def _common_faults(
    who: str, python: str, report: Report, driver: Driver | None
) -> Iterator[tuple[str, str]]:
    if report.import_error:
        remedy = _import_remedy(report.import_error, python == sys.executable)
        yield f"{who} imports", f"{python}: {report.import_error}; {remedy}"
    elif driver is not None and not report.num_gpus:
        line = unusable_gpus(driver, report.torch, report.cuda, report.no_gpu_reason)
        yield "gpu unusable", line  # by its kind a fault of one node, as slurm/nodes.py reads it
    if report.foreign:
        set_here = [f"{name}={os.environ[name]}" for name in _LOADER if os.environ.get(name)]
        yield (
            f"{who} libraries",
            f"{python} loads {', '.join(report.foreign)} and has its own: remove these from "
            f"{' and '.join(set_here) or 'the places that the loader searches (ldconfig -p)'}",
        )
    if report.python_header and not report.has_python_header:
        yield (
            f"{who} Python.h",
            f"{report.python_header} is missing, with which Triton compiles: install "
            f"{Path(report.python_header).parent.name}-dev (apt) or -devel (dnf)",
        )


def _import_remedy(error: str, is_trainers: bool) -> str:
    if TOO_SLOW in error:
        return "start it again: files that have been read once are read faster"
    if "libcuda.so.1" in error:
        place = "the driver's library is not where the loader looks"
        return f"{place}: run ldconfig as root, or put its folder in LD_LIBRARY_PATH"
    path = os.environ.get("PYTHONPATH") if is_trainers else None
    first = f"unset PYTHONPATH={path}, or " if path else ""
    return f"{first}install its environment again (docs/cluster.md, section 1)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stable_opd_mcore.commands.check.node")
    parser.add_argument("--servers", default=SglangConfig().python, help="rollout.sglang.python")
    faults = node_faults(True, parser.parse_args().servers, colocated=True)
    driver = None if "driver" in faults else find_driver()
    if driver is None:
        faults.setdefault(
            "driver", "nvidia-smi is missing or lists no GPU: start this on a GPU node"
        )
    for kind, line in faults.items():
        print(f"{kind}: {line}", file=sys.stderr)
    if not faults:
        print(f"ready: {driver}; trainer and servers load their own CUDA libraries")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
