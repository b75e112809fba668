"""Seconds and model FLOPs utilisation of a 1.5B- and a 7B-shaped step on one GPU.

The teacher is a 7B in both. A 7B student with its optimizer does not fit one GPU, so its shape has
as many of the 28 layers as the plan lets fit. Utilisation is that of this depth, in which the head
has a larger share than in the whole model. MFU counts the student's own products, three times its
forward pass, over the update's seconds and the vendor's dense bf16 peak.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from benchmarks.gpu.measured_step import (
    ONE_AND_A_HALF_B,
    SEVEN_B,
    TINY,
    Shape,
    deepest_that_fits,
    flops_of,
    measure_shape,
    planned_shape,
    shape_config,
    this_device,
)
from benchmarks.gpu.part import Options
from benchmarks.gpu.parts.memory import record_memory
from benchmarks.gpu.record import Record


def run(record: Record, options: Options) -> None:
    for shape in (ONE_AND_A_HALF_B, SEVEN_B) if options.on_gpu else (TINY,):
        folder = options.scratch / shape.name
        folder.mkdir()
        if options.on_gpu:
            shape = deepest_that_fits(shape, folder, this_device("cuda"))
        measure(record, shape, options)


def measure(record: Record, shape: Shape, options: Options) -> None:
    folder = options.scratch / shape.name
    context = multiprocessing.get_context("spawn")  # a process has all memory when it starts
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        found = pool.submit(measure_shape, shape, folder, options.device).result()
    config, name = shape_config(shape, folder), shape.name
    flops = flops_of(shape, config)
    tokens = planned_shape(shape, config).trained_tokens
    layers = shape.student["num_hidden_layers"]
    note = f"{layers} layers, {tokens:,} tokens, micro-batches of {shape.micro_batch_tokens:,}"
    record.figure(f"{name}: update", found.seconds["update"], "s", note)
    record.figure(f"{name}: scores of teacher and reference", found.seconds["score"], "s")
    record.figure(f"{name}: tokens", tokens / sum(found.seconds.values()), "tokens/s")
    record_memory(record, name, found)
    update = flops.update / found.seconds["update"] / 1e12
    score = flops.score / found.seconds["score"] / 1e12
    record.figure(f"{name}: products of the update", update, "TFLOP/s")
    record.figure(f"{name}: products of the scores", score, "TFLOP/s")
    if options.on_gpu:
        peak = this_device("cuda").matmul_tflops
        mfu = flops.student / found.seconds["update"] / 1e12 / peak
        record.figure(f"{name}: MFU of the update", 100 * mfu, "%", f"of {peak:g} TFLOP/s")
