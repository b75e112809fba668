"""Speed and memory of the loss, forward and backward: ours, its four products, torch, Liger.

At the size of a 7B model's head, and at a quarter of its vocabulary: what one of four
tensor-parallel ranks computes. The messages between those ranks are not measured. Then where the
time goes: launches and copies a block, and the registers and occupancy of the Triton kernels.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record
from benchmarks.loss import IMPLEMENTATIONS, Point, make_inputs, measure

WHOLE = Point("ours", 8192, 3584, 152064, "bf16", "cuda", 1024, 5, 1)
TINY = Point("ours", 64, 16, 1031, "bf16", "cpu", 32, 1, 1)
MEMORY_GOAL = "goal 1,024; the head's gradient is summed in main_grad"
TENSOR_RANKS = 4
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # a Hopper multiprocessor's
REGISTER_UNIT = 256  # registers are given to a warp in multiples of this


def run(record: Record, options: Options) -> None:
    point = WHOLE if options.on_gpu else TINY
    sizes = f"T={point.tokens}, H={point.hidden}, V={point.vocab}, {point.dtype}"
    found: dict[str, dict[str, float]] = {}
    for name in IMPLEMENTATIONS:
        if name == "liger" and (not options.on_gpu or find_spec("liger_kernel") is None):
            record.skip("liger", "needs CUDA and liger-kernel")
            continue
        ours = name.startswith("ours")
        found[name] = measured(replace(point, implementation=name, main_grad=ours))
        record.figure(f"{name}: time", found[name]["seconds"] * 1e3, "ms", sizes)
        peak = found[name]["peak_without_gradients_mib"]
        record.figure(f"{name}: peak without gradients", peak, "MiB", MEMORY_GOAL if ours else "")
    if not options.on_gpu:
        return
    for name in ("ours", "ours, opd"):
        ratio = found[name]["seconds"] / found["gemms"]["seconds"]
        record.figure(f"{name}: time over that of its four products", ratio, note="goal 1.15")
    measure_shard(record, point, found["ours, opd"]["seconds"])
    profile_blocks(record, point)
    describe_kernels(record)


def measured(point: Point) -> dict[str, float]:
    """The figures of one point, with the device's memory free before it."""
    if point.device == "cuda":
        torch.cuda.empty_cache()
    return measure(point)


def measure_shard(record: Record, whole: Point, whole_seconds: float) -> None:
    """One tensor rank's part of the work, with blocks of as many rows and of as many logits."""
    for rows in (whole.block_rows, whole.block_rows * TENSOR_RANKS):
        shard = replace(
            whole,
            implementation="ours, opd",
            main_grad=True,
            vocab=whole.vocab // TENSOR_RANKS,
            block_rows=rows,
        )
        found = measured(shard)
        name = f"ours, opd: a quarter of the vocabulary, blocks of {rows} rows"
        record.figure(f"{name}: time", found["seconds"] * 1e3, "ms")
        share = whole_seconds / (TENSOR_RANKS * found["seconds"])
        record.figure(f"{name}: strong scaling", 100 * share, "%", "without messages; goal 90")


def profile_blocks(record: Record, point: Point) -> None:
    """Launches, copies and GPU time a block, from two runs that differ by four blocks."""
    few, many = (profiled(replace(point, tokens=n * point.block_rows)) for n in (2, 6))
    for name, seconds in sorted(many["seconds"].items(), key=lambda item: -item[1])[:8]:
        per_block = (seconds - few["seconds"].get(name, 0.0)) / 4
        record.figure(f"GPU time a block: {name[:60]}", per_block * 1e3, "ms")
    for kind in ("launches", "copies"):
        record.figure(f"{kind} a block", (many[kind] - few[kind]) / 4, note="forward and backward")


def profiled(point: Point) -> dict[str, Any]:
    """GPU seconds by kernel, the number of kernels, and of copies, of one step of "ours, opd"."""
    from torch.profiler import ProfilerActivity, profile

    step, inputs = IMPLEMENTATIONS["ours, opd"](point), make_inputs(point)
    step(inputs).backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(inputs).backward()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    copies = sum(event.count for event in events if event.key.startswith("Mem"))
    return {
        "seconds": {event.key: event.self_device_time_total / 1e6 for event in events},
        "launches": sum(event.count for event in events) - copies,
        "copies": copies,
    }


def describe_kernels(record: Record) -> None:
    """Record the registers, spills and resident blocks of each kernel compiled in this process."""
    from stable_opd_mcore.losses import triton_ops

    for name, kernel in vars(triton_ops).items():
        forms = {(x.n_regs, x.n_spills, x.metadata.num_warps) for x in compiled_forms(kernel)}
        for registers, spilled, warps in sorted(forms):
            note = f"{spilled} spilled, {warps} warps"
            record.figure(f"{name}: registers a thread", float(registers), note=note)
            blocks = resident_blocks(registers, warps)
            record.figure(f"{name}: blocks a multiprocessor", float(blocks), note=note)


def compiled_forms(kernel: Any) -> list[Any]:
    """What Triton has compiled and loaded of a kernel; of anything else, nothing."""
    caches = getattr(kernel, "device_caches", {})
    compiled = [form for cache in caches.values() for form in cache[0].values()]
    return [form for form in compiled if getattr(form, "n_regs", None)]


def resident_blocks(registers: int, warps: int) -> int:
    """Blocks that fit on a Hopper multiprocessor by their registers and threads."""
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(BLOCKS, THREADS // (32 * warps), REGISTERS // (of_warp * warps))
