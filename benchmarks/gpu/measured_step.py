"""Training steps of a given shape: seconds by phase, peak memory, and what `plan` says of both.

Weights are random and drawn on the device, responses are random tokens of a fixed length: no
rollout is sampled, so a step is the scores and the update. Everything else is the trainer's own
step. Called by the parts "memory" and "utilisation".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.inputs import PROMPT_WORDS, config_of, qwen2, write_inputs
from benchmarks.plan_memory import HOST, resident_bytes, restart_peak
from stable_opd_mcore.commands.plan.memory import MemoryPlan, memory_plan
from stable_opd_mcore.commands.plan.planned_run import PlannedRun, Work, read_models
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.parallel.world import start_world
from stable_opd_mcore.placement.hardware import DEVICES, GIB, Cluster, Device
from stable_opd_mcore.placement.layout import Layout
from stable_opd_mcore.placement.model_size import ModelSize
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.step import train_step

SHARE_OF_MEMORY = 0.85  # most of the GPU that a shape may take by the plan


@dataclass(frozen=True)
class Shape:
    """A run to measure."""

    name: str
    student: dict[str, Any]
    teacher: dict[str, Any]
    prompts: int
    samples: int
    response_tokens: int
    micro_batch_tokens: int
    precision: str = "bf16"

    @property
    def vocab(self) -> int:
        return self.student["vocab_size"]

    @property
    def work(self) -> Work:
        return Work(PROMPT_WORDS, self.response_tokens)

    def with_layers(self, layers: int) -> Shape:
        """The same with another depth of the student and of its reference."""
        return replace(self, student=self.student | {"num_hidden_layers": layers})


@dataclass(frozen=True)
class Measured:
    """The last of the steps."""

    seconds: dict[str, float]  # phases "score" and "update"
    peak_gib: float  # allocated on the GPU; on a CPU resident, above the libraries
    planned: MemoryPlan


class FixedLengthEngine(RolloutEngine):
    """Responses of random tokens, all of the same length."""

    def __init__(self, vocab: int) -> None:
        self.weight_version = 0
        self._vocab = vocab

    def publish(self, weight_version: int) -> None:
        self.weight_version = weight_version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
    ) -> list[Rollout]:
        draw, length = np.random.default_rng(step), sampling.max_new_tokens
        return [
            Rollout(
                prompt=prompt,
                sample_index=index,
                token_ids=draw.integers(3, self._vocab, length, dtype=np.int32),
                rollout_logprobs=np.zeros(length, np.float32),
                finish_reason=Ending.LENGTH,
                weight_version=self.weight_version,
            )
            for prompt in prompts
            for index in range(sampling.num_samples)
        ]


def measure_shape(shape: Shape, folder: Path, device: str, steps: int = 3) -> Measured:
    """Build the run and train it for some steps."""
    config = shape_config(shape, folder)
    write_inputs(folder, shape.vocab, shape.prompts, shape.response_tokens)
    world = start_world(config.parallel, config.train.seed)
    before = resident_bytes("VmRSS")
    with fast_random_weights():
        run = build_run(RunInputs(config), world)
    run = replace(run, engine=FixedLengthEngine(shape.vocab))
    state, values = TrainState(), {}
    with run.grader:
        for _ in range(steps):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            else:
                restart_peak()
            result = train_step(run, state)
            state, values = result.state, result.metrics.values_by_key()
    if device == "cuda":
        num_bytes = torch.cuda.max_memory_allocated()
    else:
        num_bytes = resident_bytes("VmHWM") - before
    seconds = {phase: values[f"time/{phase}"] or 0.0 for phase in ("score", "update")}
    return Measured(seconds, num_bytes / GIB, plan_of(shape, config, this_device(device)))


def shape_config(shape: Shape, folder: Path) -> Config:
    return config_of(
        folder,
        shape.name,
        student={"architecture": shape.student},
        teacher={"architecture": shape.teacher},
        sampling={"max_new_tokens": shape.response_tokens},
        rollout={
            "prompts_per_step": shape.prompts,
            "samples_per_prompt": shape.samples,
            "save": "none",
        },
        train={
            "steps": 10,
            "precision": shape.precision,
            "micro_batch_tokens": shape.micro_batch_tokens,
        },
    )


def plan_of(shape: Shape, config: Config, device: Device) -> MemoryPlan:
    return memory_plan(planned_shape(shape, config, device))


def planned_shape(shape: Shape, config: Config, device: Device = HOST) -> PlannedRun:
    return PlannedRun(config, read_models(config), Cluster(1, 1), device, shape.work)


def planned_gib(plan: MemoryPlan) -> float:
    """The planned peak of the phases that are measured."""
    return max(plan.bytes_in("score"), plan.bytes_in("update")) / GIB


def deepest_that_fits(shape: Shape, folder: Path, device: Device) -> Shape:
    """The shape with as many layers as the plan lets fit, at most its own, in steps of two."""
    for layers in range(shape.student["num_hidden_layers"], 2, -2):
        shallower = shape.with_layers(layers)
        plan = plan_of(shallower, shape_config(shallower, folder), device)
        if planned_gib(plan) <= SHARE_OF_MEMORY * device.memory_gib:
            return shallower
    raise RuntimeError(f"by the plan not even four layers of {shape.name} fit")


def this_device(device: str) -> Device:
    """The planning record of this machine's GPU, with the memory that it reports."""
    if device != "cuda":
        return HOST
    properties = torch.cuda.get_device_properties(0)
    known = [DEVICES[name] for name in DEVICES if name.upper() in properties.name.upper()]
    return replace((known or [DEVICES["h200"]])[0], memory_gib=properties.total_memory / GIB)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one step in matrix products and attention.

    The student trains on golden solutions too; teacher and reference do not score them.
    """

    score: float  # forward passes of teacher and reference, and the teacher's head
    update: float  # forward and backward of the student and its head, and the reference's head
    student: float  # the student's own part of `update`: what MFU counts


def flops_of(shape: Shape, config: Config) -> Flops:
    run, tokens = planned_shape(shape, config), shape.work.tokens

    def forward(architecture: Architecture, sequences: int) -> float:
        return ModelSize(architecture, Layout(1)).forward_flops(sequences * tokens, tokens / 2)

    def head(architecture: Architecture, rows: int) -> float:
        return ModelSize(architecture, Layout(1)).head_flops(rows)

    student, teacher = read_architecture(shape.student), read_architecture(shape.teacher)
    scores = forward(teacher, run.scored) + forward(student, run.scored)
    own = 3 * (forward(student, run.sequences) + head(student, run.response_rows))
    return Flops(
        score=scores + head(teacher, run.scored_rows),
        update=own + head(student, run.scored_rows),
        student=own,
    )


@contextmanager
def fast_random_weights() -> Iterator[None]:
    """Models are built with weights drawn on their device, in an instant.

    The trainer's own drawing does not depend on device and layout, and takes a minute for a 7B.
    """

    @torch.no_grad()
    def draw(chunks: Sequence[torch.nn.Module], _: object) -> None:
        for chunk in chunks:
            for name, weight in chunk.named_parameters():
                if name.endswith("bias"):
                    weight.zero_()
                elif weight.dim() == 1:
                    weight.fill_(1.0)
                else:
                    weight.normal_(std=0.02)

    with patch("stable_opd_mcore.models.weights.fill_weights", draw):
        yield


HALF_B = Shape(
    "qwen2.5-0.5b",
    qwen2(896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
    qwen2(1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True),
    prompts=8,
    samples=4,
    response_tokens=1024,
    micro_batch_tokens=16384,
)
SEVEN_B_MODEL = qwen2(3584, 28, 28, 4, 18944, 152064)
ONE_AND_A_HALF_B = Shape(
    "qwen2.5-1.5b",
    qwen2(1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True),
    SEVEN_B_MODEL,
    prompts=8,
    samples=3,
    response_tokens=2048,
    micro_batch_tokens=16384,
)
SEVEN_B = Shape(
    "qwen2.5-7b",
    SEVEN_B_MODEL,
    SEVEN_B_MODEL,
    prompts=4,
    samples=3,
    response_tokens=2048,
    micro_batch_tokens=8192,
)
TINY = Shape(
    "tiny",
    qwen2(128, 4, 4, 2, 384, 1031),
    qwen2(192, 4, 4, 2, 576, 1031),
    prompts=2,
    samples=1,
    response_tokens=64,
    micro_batch_tokens=256,
    precision="fp32",
)
