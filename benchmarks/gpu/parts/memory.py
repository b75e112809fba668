"""Measured peak memory of a 0.5B-shaped step against what `stable-opd plan` predicts."""

from __future__ import annotations

from benchmarks.gpu.measured_step import HALF_B, TINY, Measured, measure_shape, planned_gib
from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record

GOAL = "goal: within 10 %"


def run(record: Record, options: Options) -> None:
    shape = HALF_B if options.on_gpu else TINY
    measured = measure_shape(shape, options.scratch, options.device)
    record_memory(record, shape.name, measured)
    for component in measured.planned.components:
        note = f"planned, in {', '.join(component.phases)}"
        record.figure(f"{shape.name}: {component.name}", component.bytes / 2**30, "GiB", note)


def record_memory(record: Record, name: str, measured: Measured) -> None:
    planned = planned_gib(measured.planned)
    record.figure(f"{name}: peak memory", measured.peak_gib, "GiB", f"planned {planned:.3g}")
    record.figure(f"{name}: planned over measured memory", planned / measured.peak_gib, note=GOAL)
