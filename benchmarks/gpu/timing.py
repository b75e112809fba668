"""Seconds of an operation, by CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def seconds_of(operation: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Median seconds of one call, after three that are not counted (one on a CPU)."""
    if device != "cuda":
        operation()
        return median(_host_seconds(operation) for _ in range(3))
    for _ in range(3):
        operation()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        operation()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1e3


def _host_seconds(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began
