"""One Stable-OPD step on the GPU against the CPU's, on the same rollouts, in fp32 without TF32.

The CPU draws the rollouts and takes the step first. The GPU takes it with torch's layers, which the
CPU has too, and replays the rollouts. gpu/one_step.py makes Adam's eps large: with the usual one
the update would be the gradient's sign. The step has two updates: the student is its own reference
before the first one, so only the second one has a KL. On a CPU both steps run there and are the
same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.inputs import config_of, qwen2, write_inputs
from benchmarks.gpu.one_step import StepRecord, relative_error, relative_errors, take_steps
from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record
from stable_opd_mcore.config.schema import Config

VOCAB, TINY_VOCAB = 4099, 263
METRICS = (
    "loss/total",
    "loss/pg",
    "loss/kl",
    "loss/sft",
    "grad_norm",
    "logprob/student",
    "logprob/teacher",
    "entropy/student",
    "kl/reference",
)
TENSOR_LIMIT, METRIC_LIMIT = 1e-3, 1e-4


def run(record: Record, options: Options) -> None:
    folder = options.scratch
    write_inputs(folder, VOCAB if options.on_gpu else TINY_VOCAB, prompts=8, solution_words=24)
    on_cpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    (expected,) = take_steps("torch", folder, [step_config(options, "cpu")], on_cpu)
    config = step_config(options, "device", **replaying(folder / "cpu"))
    (found,) = take_steps("torch", folder, [config], dict(os.environ))
    compare(record, found, expected)


def step_config(options: Options, name: str, **changes: Any) -> Config:
    """A Stable-OPD run of one step; other configs of the same sizes draw the same weights."""
    vocab = VOCAB if options.on_gpu else TINY_VOCAB
    hidden, layers = (256, 4) if options.on_gpu else (64, 2)
    return config_of(
        options.scratch,
        name,
        student={"architecture": qwen2(hidden, layers, 4, 2, 3 * hidden, vocab)},
        teacher={"architecture": qwen2(hidden + 64, layers, 4, 2, 3 * hidden, vocab)},
        sampling={"max_new_tokens": 48 if options.on_gpu else 8},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "save": "all"}
        | changes.pop("rollout", {}),
        optimizer={"lr": 1.0, "clip_grad": 1e9},
        train={"steps": 1, "minibatches": 2, "micro_batch_tokens": 512} | changes.pop("train", {}),
        **changes,
    )


def replaying(run_directory: Path) -> dict[str, Any]:
    """Settings that read a stored run's rollouts."""
    return {"rollout": {"engine": "replay", "replay_from": str(run_directory)}}


def compare(record: Record, found: StepRecord, expected: StepRecord) -> None:
    record.check(
        "logits before the step", relative_error(found.logits_NV, expected.logits_NV), TENSOR_LIMIT
    )
    for name in ("gradients", "update"):
        whole, worst = relative_errors(getattr(found, name), getattr(expected, name))
        record.check(f"{name}: relative error", whole, TENSOR_LIMIT)
        record.figure(f"{name}: relative error of the worst tensor", worst)
    for key in METRICS:
        want = expected.metrics[key]
        error = abs(found.metrics[key] - want) / max(abs(want), 1e-3)
        record.check(f"{key}: relative error", error, METRIC_LIMIT, note=f"{want:.6g}")
