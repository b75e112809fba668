"""A stand-in nvidia-smi that describes a driver of the test's choice."""

from pathlib import Path

from stable_opd_mcore.host.cuda_driver import Driver

SCRIPT = """#!/bin/bash
case $1 in
  --query-gpu=driver_version)
    {list_gpus}
    ;;
  --query-gpu=index,*) echo '{states}' ;;
  '') echo '| NVIDIA-SMI {release}      {label}     |' ;;
esac
"""


def write_nvidia_smi(folder: Path, driver: Driver, states: str = "") -> None:
    """`states`: a line for each GPU, as host/machine_share.py asks for them."""
    renamed = int(driver.release.partition(".")[0]) >= 610  # see find_driver
    kernel, user = ("KMD", "CUDA UMD") if renamed else ("Driver", "CUDA")
    label = f"{kernel} Version: {driver.release}     {user} Version: {driver.cuda}"
    list_gpus = f"echo {driver.release}; " * driver.num_gpus
    if not driver.num_gpus:
        list_gpus = "echo No devices were found; exit 6"
    program = folder / "nvidia-smi"
    program.write_text(
        SCRIPT.format(list_gpus=list_gpus, release=driver.release, label=label, states=states)
    )
    program.chmod(0o755)
