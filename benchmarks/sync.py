"""Seconds and bytes a second of each way of weight sync, beside a plain broadcast of as many bytes.

    python benchmarks/sync.py --sglang-python .venv-sglang/bin/python [--hidden 512 --layers 8
    --repeats 5]

One real SGLang server on this machine's CPU (its own process, gloo). The wire's own speed is a
broadcast of the same buffers between this process and one other that does nothing else, in the
same run. A publish is timed whole: session, gathering, sending, loading, flush, and both sides'
checksums; the share of the checksums is given, and the ratio is of the rest to the plain
broadcast. Not a measure of GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.rollout import sglang_sync
from stable_opd_mcore.rollout.sglang_build import build_sglang_engine
from stable_opd_mcore.rollout.sglang_checksums import ExpectedChecksums

METHODS = ("distributed", "tensor", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", default=".venv-sglang/bin/python")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    fields = {
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
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(
        read_architecture(fields), world, precision="fp32", trainable=False, seed=0
    )
    with tempfile.TemporaryDirectory() as directory:
        results = {
            method: publish_seconds(method, directory, fields, world, chunks, arguments)
            for method in METHODS
        }
    num_bytes = results["distributed"]["bytes"]
    wire = broadcast_seconds(num_bytes, arguments.bucket_mib * 2**20, arguments.repeats)
    stop_world()
    report(results, wire, num_bytes)


def publish_seconds(method, directory, fields, world, chunks, arguments) -> dict[str, float]:
    """Median over publishes, the first (which forms the process group) apart."""
    config = parse_config(
        {
            "run": {"name": method, "directory": directory},
            "student": {"architecture": fields},
            "tokenizer": {"path": "synthetic"},
            "data": {"train": {"path": "synthetic:arithmetic"}},
            "rollout": {
                "engine": "sglang",
                "sglang": {
                    "python": arguments.sglang_python,
                    "sync": method,
                    "bucket_mib": arguments.bucket_mib,
                    "arguments": ["--max-total-tokens", "2048"],
                },
            },
        },
        origin="benchmark",
    )
    engine = build_sglang_engine(config, world, chunks, str, fields["vocab_size"])
    seconds, checks = [], []
    try:
        for version in range(arguments.repeats + 1):
            with TimedChecksums() as spent:
                start = time.perf_counter()
                engine.publish(version)
                seconds.append(time.perf_counter() - start)
                checks.append(spent[0])
            num_bytes = engine.take_metrics()["engine/sync_bytes"].value()
    finally:
        engine.close()
    return {
        "first": seconds[0],
        "seconds": statistics.median(seconds[1:]),
        "checksums": statistics.median(checks[1:]),
        "bytes": num_bytes or 0.0,
    }


class TimedChecksums:
    """Seconds inside the two sides' checksums, while it lasts."""

    def __enter__(self) -> list[float]:
        spent = [0.0]

        def timed(function):
            def call(*args, **kwargs):
                start = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    spent[0] += time.perf_counter() - start

            return call

        self._saved = ExpectedChecksums.add, sglang_sync._Session._verify
        ExpectedChecksums.add = timed(self._saved[0])
        sglang_sync._Session._verify = timed(self._saved[1])
        return spent

    def __exit__(self, *exception) -> None:
        ExpectedChecksums.add, sglang_sync._Session._verify = self._saved


def broadcast_seconds(num_bytes: float, bucket_bytes: int, repeats: int) -> float:
    """Median of broadcasting as many bytes in as large buffers to one process."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = (f"{directory}/store", int(num_bytes), bucket_bytes, repeats)
        context = multiprocessing.spawn(_broadcast, args=(2, *arguments), nprocs=2, join=False)
        assert context is not None
        while not context.join():
            pass
        return json.loads(Path(f"{directory}/store.result").read_text())


def _broadcast(rank, world_size, store, num_bytes, bucket_bytes, repeats) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        for offset in range(0, num_bytes, bucket_bytes):
            dist.broadcast(buffer[: min(bucket_bytes, num_bytes - offset)], src=0)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        Path(f"{store}.result").write_text(json.dumps(statistics.median(seconds[1:])))
    dist.destroy_process_group()


def report(results: dict[str, dict[str, float]], wire: float, num_bytes: float) -> None:
    mib = num_bytes / 2**20
    print(f"{mib:.0f} MiB of weights; a plain broadcast: {wire:.3f} s, {mib / wire:.0f} MiB/s")
    print(
        f"{'method':<13}{'first':>8}{'publish':>9}{'checksums':>11}{'rest':>8}{'MiB/s':>8}{'ratio':>7}"
    )
    for method, row in results.items():
        rest = row["seconds"] - row["checksums"]
        print(
            f"{method:<13}{row['first']:>8.3f}{row['seconds']:>9.3f}{row['checksums']:>11.3f}"
            f"{rest:>8.3f}{mib / rest:>8.0f}{rest / wire:>7.2f}"
        )


if __name__ == "__main__":
    main()
