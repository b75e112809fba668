"""A step on responses of 32k tokens: four context-parallel ranks against one, on a CPU in fp32.

    python -m benchmarks.long_responses

Stable-OPD with the exact KL and the control variate on a tiny model and the same random responses.
Prints loss and gradient norm of both layouts, their largest relative difference, and each rank's
peak of resident memory. The torch attention of a CPU keeps a mask of [slice, sequence] under
context parallelism, which Transformer Engine's does not.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.plan_memory import MIB, resident_bytes, restart_peak
from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.parallel.world import gather_objects, start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.train import step
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.samples.drawing import own_share
from stable_opd_mcore.train.setup import build_run

WINDOW = 32768
RESPONSES = (32700, 5001)  # tokens
STEPS = 1


def config_of(directory: str, context: int) -> Config:
    architecture = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": WINDOW,
        "vocab_size": 32,
        "rope_theta": 1e6,
    }
    values: dict[str, Any] = {
        "run": {"name": f"context_{context}", "directory": directory},
        "student": {"architecture": architecture},
        "teacher": {"architecture": architecture | {"num_hidden_layers": 1}},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": {"path": "synthetic:arithmetic", "options": {"rows": 64}}},
        "parallel": {"context": context},
        "sampling": {"max_new_tokens": max(RESPONSES)},
        "rollout": {"prompts_per_step": len(RESPONSES), "samples_per_prompt": 1, "save": "none"},
        "objective": {"advantage": {"control_variate": True}},
        "kl": {"beta": 0.1, "estimator": "exact"},
        "mixture": {"lambda": 0.5},
        "train": {"micro_batch_tokens": WINDOW, "recompute": "full", "steps": STEPS},
        "optimizer": {"lr": 1e-3},
        "monitoring": {"tensorboard": False},
    }
    return parse_config(values, origin="long_responses")


def responses(run: Run, prompts: Sequence[Prompt], version: int, *unused: Any) -> list[Rollout]:
    """This rank's share; those of a prompt are the same on every layout."""
    rollouts = list[Rollout]()
    for prompt, length in zip(prompts, own_share(run.world, RESPONSES), strict=True):
        draw = np.random.default_rng((version, length))
        tokens = draw.integers(3, 30, length, dtype=np.int32)
        logprobs = (-3.4 + 0.1 * draw.standard_normal(length)).astype(np.float32)
        rollouts.append(Rollout(prompt, 0, tokens, logprobs, "length", version, reward=0.0))
    return rollouts


def train(rank: int, context: int, store: str, results: str) -> None:
    """One rank; rank 0 writes losses and gradient norms of the steps to `results`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(context), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=context)
    with tempfile.TemporaryDirectory() as directory:
        config = config_of(directory, context)
        run, state = build_run(config, start_world(config.parallel, 0)), TrainState()
        before, found = resident_bytes("VmRSS"), []
        restart_peak()
        with patch.object(step, "draw_rollouts", responses):
            for _ in range(STEPS):
                result = step.train_step(run, state)
                state = result.state
                values = result.metrics.values_by_key()
                found.append([values["loss/total"], values["grad_norm"]])
        peaks = gather_objects((resident_bytes("VmHWM") - before) / MIB)
        if rank == 0:
            np.save(results, np.array(found))
            print(f"context {context}: loss, gradient norm of each step {found}")
            print(
                f"  MiB a rank beside libraries and model: {', '.join(f'{x:.0f}' for x in peaks)}"
            )
        stop_world()


def main() -> None:
    found: list[Any] = []
    for context in (1, 4):
        with tempfile.TemporaryDirectory() as directory:
            store, results = Path(directory) / "store", Path(directory) / "results.npy"
            arguments = (context, store.as_uri(), str(results))
            spawn(train, args=arguments, nprocs=context)
            found.append(np.load(results))
    one, four = found
    print(f"largest relative difference {np.abs(four / one - 1).max():.1e}")


if __name__ == "__main__":
    main()
