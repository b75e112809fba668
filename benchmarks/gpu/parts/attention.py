"""Transformer Engine's attention over 32k packed tokens of a 7B's shape, next to torch's.

Which one it chooses, as a run's start says; outputs and gradients next to torch's attention of each
sequence, where fp32 is the definition and torch's own bf16 error sets the limit; seconds of a call,
also of one whose longest sequence is new. Needs Transformer Engine and CUDA.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.inputs import qwen2
from benchmarks.gpu.measured_step import fast_random_weights
from benchmarks.gpu.one_step import relative_error
from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record, Skipped
from benchmarks.gpu.timing import seconds_of
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.attention_backend import MOST_UNFUSED_GIB, Batch, chosen_attentions
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.spec import transformer_engine_is_usable
from stable_opd_mcore.parallel.world import start_world, stop_world

TOKENS, SEQUENCES = 32768, (2, 8, 40)
FIELDS = qwen2(3584, 1, 28, 4, 64, 53)  # attention of Qwen2.5-7B; the rest is small
TIMES_TORCH, ADDED = 2.0, 2e-3  # how far beyond the error of torch's attention in bf16
NAMES = ("output", "queries' gradient", "keys' gradient", "values' gradient")


@dataclass(frozen=True)
class Inputs:
    """Queries [T, A, D], keys and values [T, G, D] of packed sequences, and the output's gradient
    [T, A x D]."""

    tensors: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def random(cls, lengths: Sequence[int], config: Any, device: str) -> Inputs:
        tokens, size = sum(lengths), config.kv_channels
        heads = (config.num_attention_heads, *[config.num_query_groups] * 2)
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        q, k, v = (draw(tokens, each, size) for each in heads)
        return cls((q, k, v), draw(tokens, heads[0] * size), tuple(lengths))


def run(record: Record, options: Options) -> None:
    if not options.on_gpu or not transformer_engine_is_usable():
        raise Skipped("needs Transformer Engine and CUDA")
    world = start_world(ParallelConfig(), seed=0)
    with fast_random_weights():
        (chunk,) = build_model(read_architecture(FIELDS), world, precision="bf16", seed=0)
    for number in SEQUENCES:
        measure(record, chunk, even_lengths(TOKENS, number), options.device)
    stop_world()


def even_lengths(tokens: int, number: int) -> list[int]:
    """Lengths around the mean, the last one what is left."""
    share = tokens // number
    lengths = [share + (16 if i % 2 else -16) for i in range(number - 1)]
    return [*lengths, tokens - sum(lengths)]


def measure(record: Record, chunk: Any, lengths: Sequence[int], device: str) -> None:
    name, batch = f"{len(lengths)} sequences", Batch(sum(lengths), max(lengths))
    (chosen,) = chosen_attentions([chunk], batch)
    record.figure(f"{name}: backend", str(chosen), note=chosen.why if chosen.reasons else "")
    if chosen.name == "none" or (chosen.name == "unfused" and chosen.scores_gib > MOST_UNFUSED_GIB):
        record.check(
            f"{name}: scores that a run refuses", chosen.scores_gib, MOST_UNFUSED_GIB, "GiB"
        )
        return
    layer = chunk_layer(chunk)
    inputs = Inputs.random(lengths, layer.config, device)
    exact = by_torch(inputs, torch.float32)
    rounded = by_torch(inputs, torch.bfloat16)
    found = by_engine(layer, inputs)
    for part, ours, torchs, want in zip(NAMES, found, rounded, exact, strict=True):
        limit = TIMES_TORCH * relative_error(torchs, want) + ADDED
        record.check(f"{name}: {part}", relative_error(ours, want), limit, note="of torch's fp32")
    record.figure(f"{name}: both passes", seconds_of(lambda: by_engine(layer, inputs), device), "s")
    other = Inputs.random([length - 8 for length in lengths], layer.config, device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    by_engine(layer, other)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    record.figure(f"{name}: both passes, the first with these lengths", seconds, "s")


def chunk_layer(chunk: Any) -> Any:
    """The attention of the first layer, without its matrices."""
    extension: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    return next(m for m in chunk.modules() if isinstance(m, extension.TEDotProductAttention))


def by_engine(layer: Any, inputs: Inputs) -> list[Tensor]:
    """Output and gradients by Transformer Engine, called as Megatron calls it."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    ends = torch.tensor([0, *inputs.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.to(inputs.gradient.device)
    longest = max(inputs.lengths)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs.tensors)
    output = layer(q, k, v, None, AttnMaskType.causal, packed_seq_params=packed)
    output = output.view(inputs.gradient.shape)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), inputs.gradient)]


def by_torch(inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """The same by torch, one sequence after another."""
    parts = []
    pieces = [tensor.split(inputs.lengths) for tensor in (*inputs.tensors, inputs.gradient)]
    for q, k, v, gradient in zip(*pieces, strict=True):
        q, k, v = (tensor.to(dtype).detach().requires_grad_() for tensor in (q, k, v))
        copies = q.shape[1] // k.shape[1]
        heads = (q, k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1))
        rows = (x.transpose(0, 1)[None] for x in heads)  # four dimensions: else torch stores scores
        output = F.scaled_dot_product_attention(*rows, is_causal=True)
        output = output[0].transpose(0, 1).flatten(1)
        grads = torch.autograd.grad(output, (q, k, v), gradient.to(dtype))
        parts.append((output.detach(), *grads))
    return [torch.cat(part) for part in zip(*parts, strict=True)]
