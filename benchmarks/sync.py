"""Seconds and bytes per second of each transport of weights, compared with plain copies.

    python -m benchmarks.sync [--sglang-python .venv-sglang/bin/python] [--hidden 1024 --layers 16]
    python -m benchmarks.sync --smoke   # a tiny model, one round: does it run?

One real SGLang server on this machine's CPU takes the weights of a random Qwen2 in fp32 from this
process. Transports and plain copies ("wires") alternate, in another order every round. The first
round, in which process groups form and memory is first touched, is left out. The wires copy the
same bytes in buckets of the same size between memory that was used before:

    broadcast   of one process' whole weights into another's, over gloo; CPU is both processes'
    one buffer  the same, but from one bucket's memory into one bucket's, again and again
    memory      the weights copied into shared memory and out of it
    files       written and read back

"publish" is the time that the trainer waits, "verify" its last part, in which both sides compute
checksums. "rest" is the difference: sessions, gathering, packing, sending, loading, flush, version;
the ratios are of it. "SGLang" is the part of the rest inside update requests; for `disk` it is the
server's own loading only. Not a measure of GPUs.

All traffic goes over loopback. With --gbit-per-second trainer and server, and the broadcast's two
processes, are on hosts of their own (network namespaces, as root) joined by a link of that rate,
which HTTP crosses too; memory and files, the wires of `tensor` and `disk`, are left out then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.rollout.sglang.group import DistributedTransport
from stable_opd_mcore.rollout.sglang.server_setup import model_config, write_model_config
from stable_opd_mcore.rollout.sglang.sync import send_weights, stamp
from stable_opd_mcore.rollout.sglang.transports import (
    DiskTransport,
    Target,
    TensorTransport,
    Transport,
)
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.process import ServerOptions, SglangServer
from tests.integration.hosts import Host, cannot_make_hosts, hosts, on

WIRE_OF = {"distributed": "broadcast", "tensor": "memory", "disk": "files"}
ONE_BUFFER = "one buffer"
VERSIONS = itertools.count()
TIMEOUT_SECONDS = 300.0
Rows = dict[str, list[dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sglang-python", default=".venv-sglang/bin/python")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one round")
    parser.add_argument("--gbit-per-second", type=float, help="of a link between two hosts")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.hidden, arguments.layers, arguments.repeats = 128, 2, 1
        arguments.vocabulary, arguments.bucket_mib = 1024, 1
    torch.set_num_threads(1)
    with ExitStack() as stack:
        other = stack.enter_context(another_host(arguments.gbit_per_second))
        measure(arguments, other)


def measure(arguments: argparse.Namespace, other: Host | None) -> None:
    """Measure wires and transports in turn and print the report."""
    architecture = read_architecture(fields(arguments))
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(architecture, world, precision="fp32", trainable=False, seed=0)
    num_bytes = sum(weight.nbytes for chunk in chunks for weight in chunk.parameters())
    bucket_bytes = min(arguments.bucket_mib * 2**20, num_bytes)
    print(f"{num_bytes / 2**20:.0f} MiB of weights, buckets of {bucket_bytes / 2**20:.0f} MiB")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ServerOptions(
            python=arguments.sglang_python,
            model=str(write_model_config(architecture, folder / "model")),
            host=other.address if other else "127.0.0.1",
            arguments=("--max-total-tokens", "2048"),
        )
        with started_on(other):
            server = SglangServer(options, folder / "server.log")
            stack.callback(server.stop)
            server.start()
        server.wait_until_healthy()
        client = TimedClient(server.url, api_key=server.api_key)
        processes = BroadcastWire(num_bytes, bucket_bytes, folder / "store", other)
        stack.enter_context(processes)
        measures: dict[str, Callable[[], dict[str, float]]] = {
            "broadcast": lambda: processes.seconds("weights"),
            ONE_BUFFER: lambda: processes.seconds(ONE_BUFFER),
        }
        transports: dict[str, Transport] = {
            "distributed": DistributedTransport(TIMEOUT_SECONDS, "gloo"),
        }
        if other is None:
            measures["memory"] = memory_wire(num_bytes, bucket_bytes)
            measures["files"] = file_wire(num_bytes, bucket_bytes, folder)
            transports["tensor"] = TensorTransport(TIMEOUT_SECONDS)
            transports["disk"] = DiskTransport(
                TIMEOUT_SECONDS, folder / "weights", model_config(architecture)
            )
        for method, transport in transports.items():
            measures[method] = partial(publish, chunks, client, transport, bucket_bytes)
        rows: Rows = {name: [] for name in measures}
        order = list(measures)
        for number in range(arguments.repeats + 1):
            random.Random(number).shuffle(order)
            for name in order:
                rows[name].append(measures[name]())
    stop_world()
    report(rows, num_bytes)


@contextlib.contextmanager
def another_host(gbit_per_second: float | None) -> Iterator[Host | None]:
    """Yields the server's host; None without a rate: this machine."""
    if gbit_per_second is None:
        yield None
        return
    if reason := cannot_make_hosts():
        raise SystemExit(f"--gbit-per-second: {reason}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with hosts(["trainer", "server"], gbit_per_second) as (trainer, server), on(trainer):
        yield server


def started_on(other: Host | None) -> contextlib.AbstractContextManager[None]:
    """Processes started in this context run on the other host, if there is one."""
    return contextlib.nullcontext() if other is None else on(other)


def fields(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": max(1, arguments.hidden // 128),
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


class TimedClient(SglangClient):
    """Records when each request began and ended."""

    def __init__(self, url: str, api_key: str | None) -> None:
        super().__init__(url, api_key=api_key)
        self.spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def submit(self, request: Any, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        reply = super().submit(request, *arguments, **options)
        spans = self.spans[request.path]
        reply.add_done_callback(lambda _: spans.append((began, time.perf_counter())))
        return reply

    def seconds(self, prefix: str) -> float:
        """The time of the requests whose path begins with `prefix`."""
        spans = [
            span for path, each in self.spans.items() if path.startswith(prefix) for span in each
        ]
        return sum(end - began for began, end in spans)


def publish(chunks, client: TimedClient, transport: Transport, bucket_bytes: int):
    """Publish once; returns the seconds of its parts."""
    version = next(VERSIONS)
    client.spans.clear()
    began = time.perf_counter()
    outcome = send_weights(
        chunks,
        [Target("server", client, 1)],
        transport,
        label=str(version),
        dtype=torch.float32,
        bucket_bytes=bucket_bytes,
    )
    if outcome.failed:
        raise RuntimeError(f"the weights did not arrive: {outcome.failed}")
    stamp(client, version)
    whole = time.perf_counter() - began
    checked_from = client.spans["/weights_checker"][0][0]
    compared = client.spans["/update_weight_version"][0][0]
    verify = compared - checked_from
    return {
        "seconds": whole,
        "verify": verify,
        "rest": whole - verify,
        "sglang": client.seconds("/update_weights_from"),
    }


class BroadcastWire:
    """Two processes of a gloo group that broadcast on request."""

    def __init__(self, num_bytes: int, bucket_bytes: int, store: Path, other: Host | None) -> None:
        self._arguments = num_bytes, bucket_bytes, str(store)
        self._other = other  # the receiver's host

    def __enter__(self) -> BroadcastWire:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (rank, theirs, *self._arguments)
            process = context.Process(target=_broadcast_when_told, args=arguments, daemon=True)
            with started_on(self._other if rank else None):
                process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def seconds(self, memory: str) -> dict[str, float]:
        """Seconds until the other process has all bytes, and the CPU time of both processes."""
        for pipe in self._pipes:
            pipe.send(memory)
        seconds, cpu = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return {"seconds": max(seconds), "cpu": sum(cpu)}

    def __exit__(self, *exception) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def _broadcast_when_told(rank, pipe, num_bytes, bucket_bytes, store) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    weights = torch.ones(num_bytes, dtype=torch.uint8)
    while (memory := pipe.recv()) is not None:
        dist.barrier()
        began, cpu_before = time.perf_counter(), time.process_time()
        for start in range(0, num_bytes, bucket_bytes):
            size = min(bucket_bytes, num_bytes - start)
            offset = 0 if memory == ONE_BUFFER else start
            dist.broadcast(weights[offset : offset + size], src=0)
        dist.barrier()
        pipe.send((time.perf_counter() - began, time.process_time() - cpu_before))
    dist.destroy_process_group()


def memory_wire(num_bytes: int, bucket_bytes: int) -> Callable[[], dict[str, float]]:
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    shared = torch.ones(bucket_bytes, dtype=torch.uint8).share_memory_()

    def seconds() -> dict[str, float]:
        began = time.perf_counter()
        for start in range(0, num_bytes, bucket_bytes):
            size = min(bucket_bytes, num_bytes - start)
            shared[:size].copy_(source[start : start + size])
            target[start : start + size].copy_(shared[:size])
        return {"seconds": time.perf_counter() - began}

    return seconds


def file_wire(num_bytes: int, bucket_bytes: int, folder: Path) -> Callable[[], dict[str, float]]:
    buffer = torch.ones(bucket_bytes, dtype=torch.uint8).numpy()

    def seconds() -> dict[str, float]:
        files = []
        began = time.perf_counter()
        for start in range(0, num_bytes, bucket_bytes):
            files.append(folder / f"wire-{len(files)}")
            with files[-1].open("wb") as out:
                out.write(buffer[: min(bucket_bytes, num_bytes - start)].data)
        for file in files:
            with file.open("rb") as source:
                source.readinto(buffer.data)
            file.unlink()
        return {"seconds": time.perf_counter() - began}

    return seconds


def report(rows: Rows, num_bytes: int) -> None:
    """Print two tables: the median and the smallest of every figure."""
    mib = num_bytes / 2**20
    rounds = len(rows["broadcast"]) - 1
    load = os.getloadavg()[0]
    print(f"{rounds} rounds, torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}")
    for title, pick in (("medians", median), ("smallest", min)):
        picked = {
            name: {key: pick(row[key] for row in each[1:]) for key in each[0]}
            for name, each in rows.items()
        }
        print(f"\n{title}")
        for wire, row in picked.items():
            if wire in WIRE_OF:
                continue
            cpu = f"{row['cpu']:>8.3f} s of CPU" if "cpu" in row else ""
            print(f"{wire:<13}{row['seconds']:>8.3f} s{mib / row['seconds']:>8.0f} MiB/s{cpu}")
        print(
            f"{'method':<13}{'publish':>9}{'verify':>8}{'rest':>8}{'SGLang':>8}{'MiB/s':>8}"
            f"{'x broadcast':>13}{'x one buffer':>14}{'x its wire':>12}"
        )
        for method, wire in WIRE_OF.items():
            if method not in picked:
                continue
            row = picked[method]
            ratios = [row["rest"] / picked[w]["seconds"] for w in ("broadcast", ONE_BUFFER, wire)]
            print(
                f"{method:<13}{row['seconds']:>9.3f}{row['verify']:>8.3f}{row['rest']:>8.3f}"
                f"{row['sglang']:>8.3f}{mib / row['rest']:>8.0f}"
                f"{ratios[0]:>13.2f}{ratios[1]:>14.2f}{ratios[2]:>12.2f}"
            )


if __name__ == "__main__":
    main()
