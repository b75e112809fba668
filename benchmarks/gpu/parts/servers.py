"""Training with SGLang servers on the trainer's GPU: memory handed over, weights by CUDA IPC.

Two steps of a small model through the command line, as a user runs them; with a second GPU also on
servers of their own, with weights over NCCL. Every publish is verified by checksums inside the run,
and the log-probabilities of servers and trainer are compared. On a CPU the same with CPU servers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import torch

from benchmarks.gpu.inputs import config_of, qwen2, write_inputs
from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record, Skipped
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.monitoring.metric_sinks import read_metrics

VOCAB = 515
STEPS = 2
GAP_LIMIT = {"bf16": 0.5, "fp32": 1e-3}  # largest |server - trainer| log-probability of a token
REPORTED = (
    "time/rollout",
    "time/score",
    "time/update",
    "time/sync",
    "memory/peak_gib",
    "memory/left_gib",
)


def run(record: Record, options: Options) -> None:
    refuse_without_sglang(options)
    write_inputs(options.scratch, VOCAB, prompts=16, solution_words=16)
    colocated = served_config(options, "colocated", placement="colocated", sync="tensor")
    record_run(record, colocated, train(colocated))
    if options.on_gpu and torch.cuda.device_count() < 2:
        record.skip("servers of their own, weights over NCCL", "needs a second GPU")
        return
    if options.on_gpu:
        apart = served_config(
            options, "disaggregated", placement="disaggregated", sync="distributed"
        )
        record_run(record, apart, train(apart))


def refuse_without_sglang(options: Options) -> None:
    python = options.sglang_python
    if shutil.which(python) is None:
        raise Skipped(f"no {python}: name SGLang's interpreter with --sglang-python")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    if subprocess.run([python, "-c", code], check=False).returncode:
        raise Skipped(f"{python} has no package sglang")


def served_config(options: Options, name: str, **sglang: Any) -> Config:
    return config_of(
        options.scratch,
        name,
        student={"architecture": qwen2(256, 2, 4, 2, 512, VOCAB)},
        teacher={"architecture": qwen2(256, 2, 4, 2, 512, VOCAB)},
        sampling={"max_new_tokens": 16},
        rollout={
            "engine": "sglang",
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "sglang": {"python": options.sglang_python, **sglang},
        },
        train={"steps": STEPS, "precision": "bf16" if options.on_gpu else "fp32"},
    )


def train(config: Config) -> list[dict[str, Any]]:
    """Run the config through the command line; the rows of its metrics."""
    file = config.run.path.with_suffix(".yaml")
    save_config(config, file)
    command = [sys.executable, "-m", "stable_opd_mcore", "train", str(file)]
    finished = subprocess.run(command, env=os.environ, check=False)
    if finished.returncode:
        raise RuntimeError(f"the run {config.run.name} ended with code {finished.returncode}")
    return read_metrics(config.run.path / "metrics.jsonl")


def record_run(record: Record, config: Config, rows: list[dict[str, Any]]) -> None:
    name, last = config.run.name, rows[-1]
    record.check(f"{name}: steps missing", float(STEPS - len(rows)), 0)
    gap = max(row["logprob/rollout_gap_max"] for row in rows)
    record.check(f"{name}: log-probability gap", gap, GAP_LIMIT[config.train.precision], "nats")
    for key in REPORTED:
        if key in last:  # only a run with colocated servers counts memory/left_gib
            record.figure(f"{name}: {key}", last[key], "GiB" if key.endswith("gib") else "s")
