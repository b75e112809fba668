"""Training with SGLang servers on the trainer's GPU: memory handed over, weights by CUDA IPC.

First one server by itself: what it holds once it has released its memory. Then steps of a small
model through the command line, as a user runs them; with a second GPU also on servers of their own,
with weights over NCCL. Every publish is verified by checksums inside the run, and the
log-probabilities of servers and trainer are compared. On a CPU the same with CPU servers, without
the first.

A machine without a network can have an SGLang that is too old for a run: it lacks requests of a
publish. Then only the server by itself is tested.
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
from stable_opd_mcore.host.releases import release_numbers
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.monitoring.metric_sinks import read_metrics
from stable_opd_mcore.rollout.sglang.server_setup import write_model_config
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.command import ServerOptions
from stable_opd_mcore.serving.process import RELEASE, SglangServer

VOCAB = 515
STEPS = 5
GAP_LIMIT = {"bf16": 0.5, "fp32": 1e-3}  # largest |server - trainer| log-probability of a token
SMALL = ("--max-total-tokens", "4096", "--max-running-requests", "8")
REPORTED = (
    "time/rollout",
    "time/score",
    "time/update",
    "time/sync",
    "memory/peak_gib",
    "memory/left_gib",
)


def run(record: Record, options: Options) -> None:
    release = sglang_release(options)
    is_old = release_numbers(release) < RELEASE
    if is_old:
        needed = ".".join(map(str, RELEASE))
        note = f"older than {needed}, which a run needs: no publish is tested, a run refuses it"
        record.notice(f"SGLang {release}", note)
    if is_old or options.on_gpu:
        record_lone_server(record, options, is_old)
    if is_old:
        return
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


def sglang_release(options: Options) -> str:
    """SGLang's release in the servers' environment."""
    python = options.sglang_python
    if shutil.which(python) is None:
        raise Skipped(f"no {python}: name SGLang's interpreter with --sglang-python")
    code = "from importlib.metadata import version; print(version('sglang'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise Skipped(f"{python} has no package sglang")
    return found.stdout.strip()


def record_lone_server(record: Record, options: Options, is_old: bool) -> None:
    """Start a server, sample, release its memory, take it back, and sample again."""
    architecture = read_architecture(qwen2(256, 2, 4, 2, 512, VOCAB))
    server = SglangServer(
        ServerOptions(
            python=options.sglang_python,
            model=str(write_model_config(architecture, options.scratch / "lone")),
            device=options.device,
            dtype="bfloat16" if options.on_gpu else "float32",
            prefill_graphs=is_old,  # whose SGLang has no argument against them
            memory_saver=options.on_gpu,
            gpus=(0,) if options.on_gpu else (),
            memory_share=0.3 if options.on_gpu else None,
            arguments=SMALL,
        ),
        options.scratch / "lone_server.log",
    )
    before = used_gib(options)
    server.start()
    try:
        record.figure("server by itself: start", server.wait_until_healthy(), "s")
        client = server.client()
        record.check("server by itself: responses missing", 2 - sampled(client), 0)
        if options.on_gpu:
            tags = {"tags": ["kv_cache", "weights"]}
            holding = used_gib(options) - before
            record.figure("server by itself: memory", holding, "GiB")
            client.call("POST", "/release_memory_occupation", tags)
            released = used_gib(options) - before
            record.figure("released server: memory", released, "GiB", "the plan reserves as much")
            client.call("POST", "/resume_memory_occupation", tags)
            record.check("server after release: responses missing", 2 - sampled(client), 0)
    finally:
        server.stop()


def sampled(client: SglangClient) -> int:
    """How many of two prompts are answered by 4 tokens with log-probabilities."""
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [[1, 2, 3], [4, 5]], "sampling_params": sampling, "return_logprob": True}
    replies = client.call("POST", "/generate", body)
    return sum(len(reply["meta_info"]["output_token_logprobs"]) == 4 for reply in replies)


def used_gib(options: Options) -> float:
    if not options.on_gpu:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


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
    left = [row["memory/left_gib"] for row in rows if "memory/left_gib" in row]
    if left:  # memory that servers do not unmap after a publish would make it grow
        grown = left[-1] - left[0]
        record.figure(f"{name}: memory/left_gib, growth over {len(left)} publishes", grown, "GiB")
    for key in REPORTED:
        if key in last:  # only a run with colocated servers counts memory/left_gib
            record.figure(f"{name}: {key}", last[key], "GiB" if key.endswith("gib") else "s")
