"""How much of this machine's cores, memory and GPUs a run finds free.

A shell inside a batch job may have one core and a few GiB; other processes may be on the GPUs. Not
here: the health of GPUs (slurm/preflight.py), the memory that a run needs (`stable-opd plan`).
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CORES_PER_GPU = 2  # a rank and a server's scheduler; with fewer, servers miss their time to start
_GIB_PER_GPU = 16  # host memory: parts of the trainer wait there while servers sample
_MOST_USED_GIB = 4  # of a GPU, before a run: a driver takes up to one
_PATIENCE_SECONDS = 20  # processes that have just been killed still leave the GPU
_FIELDS = "index,uuid,memory.used,compute_mode,mig.mode.current"


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    used_gib: float
    compute_mode: str  # Default | Exclusive_Process | Prohibited
    mig: str  # Enabled | Disabled | [N/A]


def machine_faults(
    num_gpus: int, cores: int | None = None, memory_bytes: int | None = None
) -> Iterator[tuple[str, str]]:
    """Too few cores or too little host memory for this process, by its limits.

    Args:
        num_gpus: GPUs of the machine that the process may use.
        cores, memory_bytes: the limits; None: those of this process.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if cores < _CORES_PER_GPU * num_gpus:
        yield (
            "cores",
            f"this shell may use {cores} of {os.cpu_count()} cores, and {num_gpus} GPUs need at "
            f"least {_CORES_PER_GPU * num_gpus}: start it with more, in Slurm by `srun "
            "--exclusive` or --cpus-per-task",
        )
    memory_bytes = memory_limit() if memory_bytes is None else memory_bytes
    if memory_bytes is not None and memory_bytes < _GIB_PER_GPU * num_gpus * 2**30:
        yield (
            "host memory",
            f"this shell may use {memory_bytes / 2**30:.0f} GiB of host memory, and {num_gpus} "
            f"GPUs need at least {_GIB_PER_GPU * num_gpus}: start it with more, in Slurm by `srun "
            "--mem=0`",
        )


def memory_limit(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that this process's control groups allow; None: no limit."""
    if not membership.is_file():
        return None
    limits = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            tree, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = tree / group.lstrip("/")
        for parent in (folder, *folder.parents):
            if (file := parent / name).is_file() and (text := file.read_text().strip()).isdigit():
                limits.append(int(text))
            if parent == tree:
                break
    return min(limits, default=None)


def gpu_faults(colocated: bool) -> dict[str, str]:
    """What keeps a run from the GPUs that are visible: their modes, and memory in use.

    Args:
        colocated: whether trainer and servers share them.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (gpus := visible_gpus()) and any(gpu.used_gib > _MOST_USED_GIB for gpu in gpus):
        if time.monotonic() > deadline:
            break
        time.sleep(2)
    return {kind: line for gpu in gpus for kind, line in _faults_of(gpu, colocated)}


def _faults_of(gpu: Gpu, colocated: bool) -> Iterator[tuple[str, str]]:
    if gpu.mig == "Enabled":
        line = f"GPU {gpu.index} is divided (MIG), and a run takes whole GPUs"
        yield "MIG mode", f"{line}: nvidia-smi -i {gpu.index} -mig 0, as root"
    elif gpu.compute_mode == "Prohibited" or (colocated and gpu.compute_mode != "Default"):
        yield (
            "compute mode",
            f"GPU {gpu.index} has the compute mode {gpu.compute_mode}, and trainer and colocated "
            f"servers share it: nvidia-smi -i {gpu.index} -c DEFAULT, as root, or "
            "rollout.sglang.placement=disaggregated",
        )
    if gpu.used_gib > _MOST_USED_GIB:
        # by its kind a fault of one node, as slurm/nodes.py reads it
        yield (
            "gpu memory in use",
            f"GPU {gpu.index}: {gpu.used_gib:.1f} GiB are in use before the start; `nvidia-smi` "
            "lists the processes: end them, or name free GPUs in CUDA_VISIBLE_DEVICES",
        )


def visible_gpus() -> list[Gpu]:
    """What nvidia-smi says of the GPUs that CUDA_VISIBLE_DEVICES names, or of all; none where it is
    missing or does not know a field."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = [gpu for line in answer.stdout.splitlines() if (gpu := _read(line))]
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [g for g in gpus if g.index in names or any(n and g.uuid.startswith(n) for n in names)]
    return named or gpus


def _read(line: str) -> Gpu | None:
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(_FIELDS.split(",")) or not re.fullmatch(r"\d+", values[0]):
        return None
    index, uuid, used, mode, mig = values
    return Gpu(index, uuid, int(used) / 1024 if used.isdigit() else 0.0, mode, mig)
