"""Versions of everything a run uses, the machine's own rates, and its faults."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record
from benchmarks.gpu.timing import seconds_of
from stable_opd_mcore.commands.check.node import node_faults
from stable_opd_mcore.host.kernel_compilers import Faults

GIB = 2**30
PACKAGES = (
    "torch",
    "triton",
    "transformer_engine",
    "megatron-core",
    "sglang",
    "liger-kernel",
    "transformers",
)


def run(record: Record, options: Options) -> None:
    with ThreadPoolExecutor() as pool:  # the checks import while this process imports
        faults = pool.submit(faults_of_node, options) if options.on_gpu else None
        describe_software(record)
        if faults:
            describe_gpu(record)
            report_faults(record, faults.result())
    measure_rates(record, options)


def describe_software(record: Record) -> None:
    record.figure("Python", platform.python_version())
    for package in PACKAGES:
        found = installed(package)
        if found:
            record.figure(package, found)
        else:
            record.skip(package, "not installed")
    if found := installed("apex"):
        record.figure("apex", f"{found} ({apex_kind()})")
    record.figure("layers", layers_in_use())
    record.figure("Adam", adam_in_use())
    record.figure("C compiler", shutil.which("cc") or shutil.which("gcc") or "none", note="Triton")


def faults_of_node(options: Options) -> Faults:
    python = options.sglang_python if Path(options.sglang_python).exists() else None
    return node_faults(True, python, colocated=True)


def report_faults(record: Record, faults: Faults) -> None:
    """What keeps trainer or servers from running here; the trainer's faults fail the part."""
    for kind, line in faults.items():
        record.figure(kind, line)
    own = [line for kind, line in faults.items() if not kind.startswith("servers'")]
    if own:
        sys.exit("; ".join(own))


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def apex_kind() -> str:
    """PyPI's package of this name is not NVIDIA's."""
    try:
        import amp_C  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "not NVIDIA's, or without its extensions"
    return "NVIDIA's"


def layers_in_use() -> str:
    from stable_opd_mcore.models.spec import transformer_engine_is_usable

    return "Transformer Engine" if transformer_engine_is_usable() else "torch"


def adam_in_use() -> str:
    # Megatron imports without CUDA only after the package, which installs an import hook.
    importlib.import_module("stable_opd_mcore")
    optimizer = importlib.import_module("megatron.core.optimizer")

    return f"{optimizer.Adam.__module__}.{optimizer.Adam.__qualname__}"


def describe_gpu(record: Record) -> None:
    properties = torch.cuda.get_device_properties(0)
    record.figure("GPU", properties.name)
    record.figure("GPUs", float(torch.cuda.device_count()))
    record.figure("memory", properties.total_memory / GIB, "GiB")
    record.figure("multiprocessors", float(properties.multi_processor_count))
    record.figure("CUDA", str(torch.version.cuda))
    nccl = importlib.import_module("torch.cuda.nccl")
    record.figure("NCCL", ".".join(map(str, nccl.version())))
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    if shutil.which("nvidia-smi"):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        record.figure("driver", answer.stdout.strip() or answer.stderr.strip()[:80])
    else:
        record.skip("driver", "no nvidia-smi")


def measure_rates(record: Record, options: Options) -> None:
    """Rates of large operations: a matrix product, a copy on the device, copies from the host."""
    device, size = options.device, 8192 if options.on_gpu else 128
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda: a @ b, device)
    record.figure("bf16 product", 2 * size**3 / seconds / 1e12, "TFLOP/s", f"{size} cubed")
    num_bytes = 4 * GIB if options.on_gpu else 2**20
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = seconds_of(lambda: target.copy_(source), device)
    record.figure("copy on the device", 2 * num_bytes / seconds / 1e9, "GB/s", "read and written")
    if options.on_gpu:
        host = torch.ones(GIB, dtype=torch.uint8, pin_memory=True)
        for name, copy in (
            ("pinned host to device", lambda: target[:GIB].copy_(host, non_blocking=True)),
            ("device to pinned host", lambda: host.copy_(source[:GIB], non_blocking=True)),
        ):
            record.figure(name, GIB / seconds_of(copy, device) / 1e9, "GB/s")
