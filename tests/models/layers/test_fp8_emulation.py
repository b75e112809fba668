"""Emulated FP8 against its definition, number by number; forward, gradients, layouts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers.fp8_emulation import (
    E4M3,
    E5M2,
    ROUNDINGS,
    block_scale_of,
    fp8_linear,
    scale_of,
)
from stable_opd_mcore.parallel.world import start_world, stop_world
from tests.models import tiny
from tests.parallel.launch import run_ranks

SIZES = [(1, 1, 1), (5, 7, 3), (130, 257, 129), (16, 128, 64), (0, 8, 4)]  # T, H, O


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of the format, ties to an even last bit, by trying all of them."""
    bits = torch.arange(127 if dtype == E4M3 else 124, dtype=torch.uint8)  # the finite ones >= 0
    numbers = bits.view(dtype).double()
    gap = (x.double().abs()[..., None] - numbers).abs()
    ties = gap == gap.amin(dim=-1, keepdim=True)
    rank = torch.where(ties, torch.where(bits % 2 == 0, 2, 1), 0)
    return numbers[rank.argmax(dim=-1)].copysign(x).float()


def largest(dtype: torch.dtype) -> float:
    return 448.0 if dtype == E4M3 else 57344.0


def tensor_by_definition(x: Tensor, dtype: torch.dtype) -> Tensor:
    amax = float(x.abs().max()) if x.numel() else 0.0
    scale = torch.tensor(largest(dtype)) / torch.tensor(amax or largest(dtype))
    return nearest(x * scale, dtype) / scale


def blocks_by_definition(x: Tensor, rows: int, columns: int) -> Tensor:
    rounded = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            amax = block.abs().max()
            scale = 2.0 ** torch.floor(torch.log2(448 / amax)) if amax > 0 else torch.tensor(1.0)
            rounded[i : i + rows, j : j + columns] = nearest(block * scale, E4M3) / scale
    return rounded


DEFINITIONS = {
    "tensorwise": (
        lambda x: (tensor_by_definition(x, E4M3),) * 2,
        lambda w: tensor_by_definition(w, E4M3),
        lambda g: (tensor_by_definition(g, E5M2),) * 2,
    ),
    "blockwise": (
        lambda x: (blocks_by_definition(x, 1, 128), blocks_by_definition(x, 128, 1)),
        lambda w: blocks_by_definition(w, 128, 128),
        lambda g: (blocks_by_definition(g, 1, 128), blocks_by_definition(g, 128, 1)),
    ),
}


@pytest.mark.parametrize("recipe", DEFINITIONS)
def test_product_and_gradients_are_those_of_the_definition(recipe):
    for dtype in [torch.float32, torch.bfloat16]:
        for sizes in SIZES:
            tokens, inputs, outputs = sizes
            generator = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, 1, inputs, generator=generator) * 3
            w = torch.randn(outputs, inputs, generator=generator) * 0.02
            g = torch.randn(tokens, 1, outputs, generator=generator) * 1e-4
            x, w, g = (value.to(dtype).requires_grad_() for value in (x, w, g))
            of_input, of_weight, of_gradient = DEFINITIONS[recipe]

            y = fp8_linear(x, w, ROUNDINGS[recipe])
            y.backward(g)

            x_forward, x_for_weight = of_input(x.detach()[:, 0].float())
            g_for_input, g_for_weight = of_gradient(g.detach()[:, 0].float())
            w_rounded = of_weight(w.detach().float())
            close = (
                {"rtol": 1e-5, "atol": 1e-6}
                if dtype == torch.float32
                else {"rtol": 1e-2, "atol": 1e-3}
            )
            assert y.dtype == x.grad.dtype == w.grad.dtype == dtype
            for found, expected in (
                (y[:, 0], x_forward @ w_rounded.t()),
                (x.grad[:, 0], g_for_input @ w_rounded),
                (w.grad, g_for_weight.t() @ x_for_weight),
            ):
                size = float(expected.abs().sum() and expected.abs().max()) or 1.0
                torch.testing.assert_close(found.float() / size, expected / size, **close)


def test_scale_of_nothing_of_infinity_and_of_almost_nothing():
    scale = scale_of(torch.tensor([0.0, torch.inf, 1e-40, 448.0, 300.0]), E4M3)
    assert scale.tolist() == [1, 1, torch.finfo(torch.float32).max, 1, pytest.approx(448 / 300)]
    powers = block_scale_of(torch.tensor([448.0, 300.0, 223.0, 0.0]), E4M3)
    assert powers.tolist() == [1, 1, 2, 1]


ONE_RANK = ParallelConfig()
# Widths of a tensor rank's matrices are multiples of 128, so its blocks are those of one rank.
ALIGNED = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
}


def three_passes(recipe: str, parallel: ParallelConfig) -> list[Tensor]:
    """Hidden states, and the gradient of the first layer's norm, which every rank holds."""
    world = start_world(parallel, seed=0)
    fp8 = Fp8("student", recipe)
    (chunk,) = build_model(tiny.architecture("qwen2", **ALIGNED), world, fp8=fp8, seed=1)
    results = []
    for seed in range(3):
        chunk.zero_grad()
        hidden_TH = forward_hidden(chunk, tiny.microbatch([20, 17, 27], seed))
        (hidden_TH * torch.linspace(-1, 1, hidden_TH.numel()).view_as(hidden_TH)).sum().backward()
        gradient = chunk.decoder.layers[0].input_layernorm.weight.grad
        if world.sequence_parallel:
            torch.distributed.all_reduce(gradient, group=world.groups.tp)
        results += [hidden_TH.detach(), gradient.clone()]
    stop_world()
    return results


def save_passes(rank: int, world_size: int, directory: str) -> None:
    for recipe in ("tensorwise", "blockwise"):
        results = three_passes(recipe, ParallelConfig(tensor=world_size, sequence=True))
        if rank == 0:
            torch.save(results, Path(directory) / f"{recipe}.pt")


def test_two_tensor_ranks_round_as_one_but_for_tensorwise(tmp_path):
    run_ranks(2, save_passes, str(tmp_path))
    errors = {}
    for recipe in ("tensorwise", "blockwise"):
        found, expected = torch.load(tmp_path / f"{recipe}.pt"), three_passes(recipe, ONE_RANK)
        errors[recipe] = [
            float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)
        ]
    assert max(errors["blockwise"][::2]) < 1e-6, "hidden states"
    # A sum in another order may carry a value over to the next number of the format.
    assert sorted(errors["blockwise"][1::2])[1] < 1e-6
    assert max(errors["blockwise"]) < 1e-2
    assert min(errors["tensorwise"]) > 0.01, "each rank's shard has a scale of its own"


def test_all_layers_are_in_fp8_and_the_head_is_not(world):
    architecture = tiny.architecture("qwen3", head_dim=16)
    fp8 = Fp8("teacher", "blockwise")
    (chunk,) = build_model(architecture, world, fp8=fp8, trainable=False)
    emulated = [
        sum(getattr(module, "rounding", None) is not None for module in layer.modules())
        for layer in chunk.decoder.layers
    ]
    assert emulated == [4] * len(emulated)
    assert not hasattr(chunk.output_layer, "rounding")
