"""Predicted against measured peak memory of whole training steps on a CPU, in fp32.

    python -m benchmarks.plan_memory

For three sizes of student, teacher and reference and four layouts: three Stable-OPD steps, the
largest resident memory of the last step on the fullest rank, and what commands/plan/memory.py
predicts for that rank. Layers are recomputed: torch's then save as much as Transformer Engine's,
which the plan counts. Memory of libraries is subtracted: a tiny run comes first.
"""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.step import random_words, word_tokenizer
from stable_opd_mcore.commands.plan.memory import stage_plan
from stable_opd_mcore.commands.plan.planned_run import PlannedRun, Work, read_models
from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.parallel.world import World, gather_objects, start_world, stop_world
from stable_opd_mcore.placement.hardware import Cluster, Device
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.step import train_step

MIB = 2**20
VOCABULARY = 8192
WORDS = {"problem": 16, "solution": 128}
RESPONSE_TOKENS = 128
# 32 rollouts and 8 golden solutions of a step fill four micro-batches: two of each of two ranks.
MICRO_BATCH_TOKENS = 10 * (16 + 128 + 1)
SIZES = ((512, 4), (768, 6), (1024, 8))  # hidden size, layers
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"ranks": 1},
    {"ranks": 2, "tensor": 2, "sequence": True},
    {"ranks": 2, "pipeline": 2},
    {"ranks": 2},
)
HOST = Device("cpu", 1024, 0, 1, 1, 1)  # its rates are not used


def resident_bytes(field: str) -> int:
    """This process's memory: "VmRSS" now, "VmHWM" at most since `restart_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def write_inputs(directory: str) -> None:
    """A tokenizer, and prompts of 16 words with golden solutions of 128."""
    word_tokenizer(VOCABULARY).save_pretrained(directory)
    rng = random.Random(0)
    rows = [
        {name: random_words(number, VOCABULARY, rng) for name, number in WORDS.items()}
        for _ in range(64)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (Path(directory) / "prompts.jsonl").write_text("".join(lines))


def config_of(directory: str, parallel: dict[str, Any], hidden: int, layers: int) -> Config:
    architecture = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2 * max(1, hidden // 512),
        "max_position_embeddings": 2048,
        "vocab_size": VOCABULARY,
        "rope_theta": 1e4,
    }
    values: dict[str, Any] = {
        "run": {"name": "plan_memory", "directory": directory},
        "student": {"architecture": architecture},
        "teacher": {"architecture": architecture},
        "tokenizer": {"path": directory},
        "data": {
            "train": {"path": f"{directory}/prompts.jsonl", "columns": {"answer": None}},
        },
        "sampling": {"max_new_tokens": RESPONSE_TOKENS},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4},
        "kl": {"beta": 0.1},
        "mixture": {"lambda": 0.5},
        "train": {"micro_batch_tokens": MICRO_BATCH_TOKENS, "recompute": "full"},
        "monitoring": {"tensorboard": False},
        **parallel,
    }
    return parse_config(values, origin="plan_memory")


def measure(config: Config, world: World) -> Work:
    """Three steps; the peak is then the last one's, and the result its mean lengths."""
    run, state = build_run(RunInputs(config), world), TrainState()
    engine: RolloutEngine = run.engine
    try:
        for _ in range(3):
            restart_peak()
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


def compare(rank: int, layout: dict[str, Any], store: str, size: tuple[int, int]) -> None:
    """One rank of a row; rank 0 prints it.

    Needs processes of its own: freed memory is not returned to the system.
    """
    ranks = layout["ranks"]
    parallel = {"parallel": {k: v for k, v in layout.items() if k != "ranks"}}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    with tempfile.TemporaryDirectory() as directory:
        write_inputs(directory)
        tiny = config_of(directory, parallel, 128, 2)
        world = start_world(tiny.parallel, 0)
        measure(tiny, world)
        config = config_of(directory, parallel, *size)
        gc.collect()
        before = resident_bytes("VmRSS")
        work = measure(config, world)
        measured = resident_bytes("VmHWM") - before
        run = PlannedRun(config, read_models(config), Cluster(1, ranks), HOST, work)
        plan = stage_plan(run, world.pipeline_rank)
        found = gather_objects((measured, plan.peak_bytes))
        fullest, predicted = max(found)
        if rank == 0:
            hidden, layers = size
            print(
                f"| {hidden:,}, {layers} | {run.layout} | {predicted / MIB:,.0f} | "
                f"{fullest / MIB:,.0f} | {predicted / fullest:.2f} |",
                flush=True,
            )
        stop_world()


def main() -> None:
    # Else glibc keeps freed blocks of up to 32 MiB, and fragmentation is measured, too.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    print("| hidden size, layers | layout | predicted MiB | measured MiB | ratio |", flush=True)
    for size in SIZES:
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory() as directory:
                store = (Path(directory) / "store").as_uri()
                arguments = (layout, store, size)
                spawn(compare, args=arguments, nprocs=layout["ranks"])


if __name__ == "__main__":
    main()
