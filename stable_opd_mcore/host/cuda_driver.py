"""This machine's NVIDIA driver as nvidia-smi describes it, and whether torch can use its GPUs.

A driver that is too old for torch makes `torch.cuda.is_available()` false without an error. Not
here: the health of the GPUs (slurm/preflight.py).
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.cuda_libraries import no_gpu_reason

_PATIENCE_SECONDS = 60
_FIRST_DRIVERS = {12: 525, 13: 580}  # major release of CUDA -> the first driver release for it
_FABRIC_MANAGER = "802"  # CUDA's "system not yet initialized": NVSwitch is not set up


@dataclass(frozen=True)
class Driver:
    release: str  # "570.86.15"
    cuda: str  # the newest CUDA release that it supports, "12.8"; "" if nvidia-smi does not say
    num_gpus: int

    def __str__(self) -> str:
        cuda = f" for CUDA {self.cuda}" if self.cuda else ""
        gpus = "1 GPU" if self.num_gpus == 1 else f"{self.num_gpus} GPUs"
        return f"{gpus} and driver {self.release}{cuda}"


def find_driver() -> Driver | None:
    """The driver; None where there is no nvidia-smi, or it lists no GPU.

    Raises:
        UserError: nvidia-smi hangs.
    """
    try:
        listed = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
        releases = re.findall(r"^\d+\.[\d.]+", listed, re.MULTILINE)
        if not releases:
            return None
        # drivers from 610 on write "CUDA UMD Version"
        cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", _nvidia_smi())
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"nvidia-smi does not answer within {_PATIENCE_SECONDS} s: the driver hangs; reboot "
            "the machine, or set CUDA_VISIBLE_DEVICES='' to train on its CPUs"
        ) from None
    return Driver(releases[0], cuda[1] if cuda else "", len(releases))


def unusable_gpus(driver: Driver, torch: str, torch_cuda: str, reason: str) -> str:
    """A line that says why torch cannot use the GPUs: both releases, and the remedy.

    Args:
        torch, torch_cuda: torch's version, and the CUDA release that it is built for.
        reason: torch's own words.
    """
    found = f"nvidia-smi lists {driver}"
    if not torch_cuda:
        return (
            f"{found}, and torch {torch} is built without CUDA: install the cluster's torch "
            "(docs/cluster.md, section 1)"
        )
    major = _major(torch_cuda)
    if driver.cuda and _major(driver.cuda) < major:
        first = _FIRST_DRIVERS.get(major)
        newer = f"a driver of release {first} or later" if first else f"a driver for CUDA {major}"
        compatible = f"cuda-compat-{torch_cuda.replace('.', '-')}"
        return (
            f"{found}, and torch {torch} needs CUDA {torch_cuda}: install {newer}, or NVIDIA's "
            f"package {compatible} and put its folder first in LD_LIBRARY_PATH"
        )
    remedy = "`dmesg | grep -i nvrm` has the driver's errors"
    if _FABRIC_MANAGER in reason:
        remedy = "start it: systemctl start nvidia-fabricmanager"
    elif visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        remedy = f"CUDA_VISIBLE_DEVICES={visible} may hide them: unset it, or request GPUs"
    return f"{found}, and torch {torch} for CUDA {torch_cuda} can use none: {reason}; {remedy}"


def refuse_unused_gpus() -> None:
    """Refuse to compute on CPUs where nvidia-smi lists GPUs. Called where torch has no CUDA.

    CUDA_VISIBLE_DEVICES that hides all GPUs asks for the CPUs.

    Raises:
        UserError: see `unusable_gpus`.
    """
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available() or (driver := find_driver()) is None:
        return
    cuda = torch.version.cuda or ""
    line = unusable_gpus(driver, str(torch.__version__), cuda, no_gpu_reason(torch))
    raise UserError(f"{line}. To train on the CPUs, set CUDA_VISIBLE_DEVICES=''")


def _nvidia_smi(*options: str) -> str:
    answer = subprocess.run(
        ["nvidia-smi", *options], capture_output=True, text=True, timeout=_PATIENCE_SECONDS
    )
    return answer.stdout


def _major(release: str) -> int:
    return int(release.partition(".")[0])
