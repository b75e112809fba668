"""FP8: emulated products against Transformer Engine's, and a frozen model against bf16.

Output and gradients of a linear layer are compared for each recipe. The model has four layers with
the widths of Qwen2.5-7B. On a CPU only the emulation is compared, with fp32, at a tiny size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.gpu.inputs import qwen2
from benchmarks.gpu.measured_step import fast_random_weights
from benchmarks.gpu.one_step import relative_error
from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record
from benchmarks.gpu.timing import seconds_of
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.config.training import Fp8, Fp8Recipe
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers.fp8_emulation import ROUNDINGS, fp8_linear
from stable_opd_mcore.models.spec import transformer_engine_is_usable
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import MicroBatch
from tests.models.tiny import microbatch

SIZES = (2048, 3584, 4608)  # tokens, inputs, outputs of 7B's queries, keys and values
TINY_SIZES = (32, 64, 48)
SEVEN_B = qwen2(3584, 4, 28, 4, 18944, 53)  # widths of Qwen2.5-7B, four layers
TINY = qwen2(64, 2, 4, 2, 128, 53)
NAMES = ("output", "input's gradient", "weight's gradient")
ROUNDING_LIMIT = 0.1  # against fp32: an operand is rounded by up to 1/16, in e5m2 by 1/8
# The same numbers are multiplied: the order of sums differs, and bf16 at the end.
EMULATION_LIMIT = 0.01
WEIGHT_SHARE = 0.55  # share of the layers' bytes


def run(record: Record, options: Options) -> None:
    world = start_world(ParallelConfig(), seed=0)
    usable = transformer_engine_is_usable()
    if not usable:
        record.skip("Transformer Engine's FP8", "needs the package and CUDA")
    for recipe in get_args(Fp8Recipe):
        compare_products(record, recipe, options, usable)
    compare_models(record, world, options)
    stop_world()


def compare_products(record: Record, recipe: Fp8Recipe, options: Options, usable: bool) -> None:
    """A linear layer's output and gradients: the emulation's, Transformer Engine's, fp32's."""
    tokens, inputs, outputs = SIZES if options.on_gpu else TINY_SIZES
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int, size: float) -> Tensor:
        values = size * torch.randn(rows, columns, generator=generator)
        return values.to(options.device, torch.bfloat16)

    x, w, g = draw(tokens, inputs, 2), draw(outputs, inputs, 0.02), draw(tokens, outputs, 1e-4)
    exact = (x.float() @ w.float().t(), g.float() @ w.float(), g.float().t() @ x.float())
    emulated = products(x, w, g, lambda x, w: fp8_linear(x, w, ROUNDINGS[recipe]))
    for name, found, expected in zip(NAMES, emulated, exact, strict=True):
        error = relative_error(found, expected)
        record.check(f"{recipe}, emulated: {name}", error, ROUNDING_LIMIT, note="against fp32")
    if not usable:
        return
    own = transformer_engine_products(recipe, x, w, g)
    for name, found, expected in zip(NAMES, own, emulated, strict=True):
        error = relative_error(found, expected)
        record.check(f"{recipe}: {name}", error, EMULATION_LIMIT, note="against the emulation")


def products(
    x: Tensor, w: Tensor, g: Tensor, linear: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """The output of `linear`, and the gradients of input and weight by output gradient g."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = linear(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


def transformer_engine_products(
    recipe: Fp8Recipe, x: Tensor, w: Tensor, g: Tensor
) -> tuple[Tensor, ...]:
    """The same by Transformer Engine's linear layer."""
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    chosen = {"tensorwise": recipes.Float8CurrentScaling, "blockwise": recipes.Float8BlockScaling}
    linear = engine.Linear(w.shape[1], w.shape[0], bias=False, params_dtype=w.dtype)
    with torch.no_grad():
        linear.weight.copy_(w)
    x = x.detach().requires_grad_()
    with engine.fp8_autocast(enabled=True, fp8_recipe=chosen[recipe]()):
        y: Tensor = linear(x)
    return y.detach(), *torch.autograd.grad(y, (x, linear.weight), g)


def compare_models(record: Record, world: World, options: Options) -> None:
    """A frozen model's hidden states, seconds and memory, in FP8 and without."""
    fields = SEVEN_B if options.on_gpu else TINY
    batch = microbatch([SIZES[0] // 2 if options.on_gpu else 16] * 2)
    batch = replace(
        batch,
        tokens_T=batch.tokens_T.to(options.device),
        positions_T=batch.positions_T.to(options.device),
        cu_seqlens=batch.cu_seqlens.to(options.device),
    )
    plain = measure_model(fields, None, batch, world, options)
    record.figure("bf16: forward pass", plain.seconds, "s")
    for recipe in ("tensorwise", "blockwise"):
        found = measure_model(fields, Fp8("teacher", recipe), batch, world, options)
        error = relative_error(found.hidden_TH, plain.hidden_TH)
        record.figure(f"{recipe}: hidden states", error, note="relative error against bf16")
        if not transformer_engine_is_usable():
            record.figure(f"{recipe}: forward pass, emulated", found.seconds, "s")
            continue
        share = found.seconds / plain.seconds
        record.figure(f"{recipe}: seconds of a forward pass", share, "of bf16's")
        share = found.num_bytes / plain.num_bytes
        record.check(f"{recipe}: memory of the layers", share, WEIGHT_SHARE, "of bf16's")


@dataclass(frozen=True)
class _Measured:
    hidden_TH: Tensor
    seconds: float
    num_bytes: int  # allocated by building the model; 0 on a CPU


def measure_model(
    fields: dict[str, Any], fp8: Fp8 | None, batch: MicroBatch, world: World, options: Options
) -> _Measured:
    before = torch.cuda.memory_allocated() if options.on_gpu else 0
    with fast_random_weights(), torch.no_grad():
        torch.manual_seed(0)
        (chunk,) = build_model(
            read_architecture(fields), world, precision="bf16", fp8=fp8, trainable=False
        )
        num_bytes = torch.cuda.memory_allocated() - before if options.on_gpu else 0
        seconds = seconds_of(lambda: forward_hidden(chunk, batch), options.device)
        return _Measured(forward_hidden(chunk, batch), seconds, num_bytes)
