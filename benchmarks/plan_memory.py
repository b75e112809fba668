"""Predicted against measured peak memory of whole training steps on a CPU, in fp32.

    python -m benchmarks.plan_memory

For three sizes of student, teacher and reference and four layouts: three Stable-OPD steps, the
largest resident memory of the last step on the fullest rank, and what planning/memory.py predicts
for that rank with torch's layers. Memory of libraries is subtracted: a tiny run comes first.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.parallel.world import World, gather_objects, start_world, stop_world
from stable_opd_mcore.planning.hardware import Device
from stable_opd_mcore.planning.layout import layout_of
from stable_opd_mcore.planning.memory import stage_plan
from stable_opd_mcore.planning.plan import read_models
from stable_opd_mcore.planning.work import Work
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.step import train_step

MIB = 2**20
SIZES = ((512, 4, 2048), (768, 6, 2048), (1024, 8, 1024))  # hidden, layers, micro-batch tokens
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"ranks": 1},
    {"ranks": 2, "tensor": 2, "sequence": True},
    {"ranks": 2, "pipeline": 2},
    {"ranks": 2},
)
HOST = Device("cpu", 1024, 0, 1, 1, 1, 1, 1)  # its rates are not used


@dataclass
class Peak:
    """The largest resident memory of this process since `restart`, sampled every 2 ms."""

    bytes: int = 0
    _process: psutil.Process = field(default_factory=psutil.Process)
    _ended: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        self.bytes = self.resident()

    def resident(self) -> int:
        return self._process.memory_info().rss

    def __enter__(self) -> Peak:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.is_set():
            self.bytes = max(self.bytes, self.resident())
            time.sleep(0.002)


def config_of(
    directory: str, parallel: dict[str, Any], hidden: int, layers: int, tokens: int
) -> Config:
    architecture = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2 * max(1, hidden // 512),
        "max_position_embeddings": 2048,
        "vocab_size": 8192,
        "rope_theta": 1e4,
    }
    values: dict[str, Any] = {
        "run": {"name": "plan_memory", "directory": directory},
        "student": {"architecture": architecture},
        "teacher": {"architecture": architecture},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": {"path": "synthetic:arithmetic", "options": {"rows": 64}}},
        "sampling": {"max_new_tokens": 256},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4},
        "kl": {"beta": 0.1},
        "mixture": {"lambda": 0.5},
        "train": {"micro_batch_tokens": tokens},
        "monitoring": {"tensorboard": False},
        **parallel,
    }
    return parse_config(values, origin="plan_memory")


def measure(config: Config, world: World, peak: Peak) -> Work:
    """Three steps; `peak` then holds the last one's, and the result its mean lengths."""
    run, state = build_run(config, world), TrainState()
    engine: RolloutEngine = run.engine
    try:
        for _ in range(3):
            peak.restart()
            result = train_step(run, state)
            state = result.state
    finally:
        engine.close()
    responses = [len(rollout.token_ids) for rollout in result.rollouts]
    prompts = [rollout.prompt for rollout in result.rollouts]
    golden = [len(prompt.golden_token_ids or ()) for prompt in prompts[::4]]
    lengths = responses + golden
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts)
    return Work(round(prompt_tokens), round(sum(lengths) / len(lengths)))


def compare(rank: int, layout: dict[str, Any], store: str, size: tuple[int, int, int]) -> None:
    """One rank of a row; rank 0 prints it.

    Needs processes of its own: freed memory is not returned to the system.
    """
    ranks = layout["ranks"]
    parallel = {"parallel": {k: v for k, v in layout.items() if k != "ranks"}}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    with tempfile.TemporaryDirectory() as directory, Peak() as peak:
        tiny = config_of(directory, parallel, 128, 2, 256)
        world = start_world(tiny.parallel, 0)
        measure(tiny, world, peak)
        config = config_of(directory, parallel, *size)
        before = peak.resident()
        work = measure(config, world, peak)
        measured = peak.bytes - before
        models, stage = read_models(config), world.pipeline_rank
        made = layout_of(config.parallel, ranks)
        plan = stage_plan(config, models, made, stage, HOST, work, "torch")
        found = gather_objects((measured, plan.peak_bytes))
        fullest, predicted = max(found)
        if rank == 0:
            hidden, layers, _ = size
            print(
                f"| {hidden:,}, {layers} | {made} | {predicted / MIB:,.0f} | {fullest / MIB:,.0f} |"
                f" {predicted / fullest:.2f} |",
                flush=True,
            )
        stop_world()


def main() -> None:
    print("| hidden size, layers | layout | predicted MiB | measured MiB | ratio |", flush=True)
    for size in SIZES:
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory() as directory:
                store = (Path(directory) / "store").as_uri()
                arguments = (layout, store, size)
                spawn(compare, args=arguments, nprocs=layout["ranks"])


if __name__ == "__main__":
    main()
