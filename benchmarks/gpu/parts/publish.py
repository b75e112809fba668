"""Weights of a 0.5B-shaped model to another process: CUDA IPC on one GPU, NCCL to a second one.

The receiver speaks SGLang's routes and computes checksums of what arrived; without SGLang this is
all of a publish but the loading. The part "servers" publishes to SGLang itself. A receiver that
dies with a handle must leave no memory behind. On a CPU a small model travels through shared memory
and gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.inputs import qwen2
from benchmarks.gpu.measured_step import fast_random_weights
from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.rollout.sglang.group import DistributedTransport
from stable_opd_mcore.rollout.sglang.sync import Outcome, send_weights
from stable_opd_mcore.rollout.sglang.transports import Target, TensorTransport, Transport
from stable_opd_mcore.serving.client import SglangClient
from tests.rollout.weight_receiver import receiver

TIMEOUT_SECONDS = 20.0
BUCKET_BYTES = 512 * 2**20
HALF_B = qwen2(896, 24, 14, 2, 4864, 151936)
TINY = qwen2(64, 2, 4, 2, 192, 515)


@dataclass(frozen=True)
class Wire:
    name: str
    transport: Transport
    device: str  # the receiver's
    missing: str = ""  # why it cannot be tried here


def run(record: Record, options: Options) -> None:
    fields = HALF_B if options.on_gpu else TINY
    dtype = torch.bfloat16 if options.on_gpu else torch.float32
    world = start_world(ParallelConfig(), seed=0)
    with fast_random_weights():
        chunks = build_model(
            read_architecture(fields),
            world,
            precision="bf16" if options.on_gpu else "fp32",
            trainable=False,
        )

    def publish(wire: Wire, url: str, version: int) -> Outcome:
        return send_weights(
            chunks,
            [Target("receiver", SglangClient(url), 1)],
            wire.transport,
            label=str(version),
            dtype=dtype,
            bucket_bytes=BUCKET_BYTES,
        )

    for wire in wires(options):
        if wire.missing:
            record.skip(wire.name, wire.missing)
            continue
        with receiver(fields, device=wire.device) as url:
            for version in (1, 2):  # the first fills the buffers and joins the group
                began = time.perf_counter()
                outcome = publish(wire, url, version)
                seconds = time.perf_counter() - began
                note = "; ".join(outcome.failed.values())[:200]
                record.check(
                    f"{wire.name}: publish {version}, failed servers",
                    len(outcome.failed),
                    0,
                    note=note,
                )
        size = outcome.num_bytes / 2**20
        record.figure(f"{wire.name}: publish", seconds, "s", f"{size:,.0f} MiB, with checksums")
        if isinstance(wire.transport, TensorTransport):
            check_memory(record, wire, lambda url, wire=wire: publish(wire, url, 3), fields)
    stop_world()


def check_memory(
    record: Record, wire: Wire, publish: Callable[[str], Outcome], fields: dict[str, Any]
) -> None:
    """What the buffers leave on the trainer's GPU when receivers die with a handle."""
    wire.transport.buffers.free()
    before = torch.cuda.memory_allocated()
    for number in (1, 2):
        with receiver(fields, device=wire.device, fault="dies") as url:
            failed = publish(url).failed
        record.check(f"{wire.name}: dead receiver {number}, not noticed", 1 - len(failed), 0)
        wire.transport.buffers.free()
    left = (torch.cuda.memory_allocated() - before) / 2**20
    record.check(f"{wire.name}: left of the buffers after two dead receivers", left, 0, "MiB")


def wires(options: Options) -> list[Wire]:
    tensor = TensorTransport(TIMEOUT_SECONDS)
    if not options.on_gpu:
        gloo = DistributedTransport(TIMEOUT_SECONDS, "gloo")
        return [Wire("shared memory", tensor, "cpu"), Wire("gloo", gloo, "cpu")]
    several = torch.cuda.device_count() > 1
    missing = "" if several else "one GPU: NCCL refuses it twice in one group"
    nccl = DistributedTransport(TIMEOUT_SECONDS, "nccl")
    return [Wire("CUDA IPC", tensor, "cuda:0"), Wire("NCCL", nccl, "cuda:1", missing)]
