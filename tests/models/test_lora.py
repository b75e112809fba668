"""Students with low-rank factors, against their definition: a full model of the merged matrices.

Their updates, and that every layout makes the same: tests/train/test_layouts.py.
"""

from collections.abc import Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models import lora, tensors
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.description.families import FAMILIES
from stable_opd_mcore.models.files.adapted import adapted_shapes, last_name
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers.factors import _multiplied_input, add_to_output, factors_of
from stable_opd_mcore.models.lora import adapt, base_only, fill_factors, merge
from stable_opd_mcore.models.tensor_cuts import unshard
from stable_opd_mcore.models.weights import described_parameters, fill_weights, iter_hf_tensors
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch
from tests.models import tiny

LORA = LoraConfig(rank=4, expert_rank=2, alpha=8.0)
Pairs = dict[str, tuple[Tensor, Tensor]]  # HF name -> A [R, I], B [O, R]


def of_some_matrices(architecture: Architecture) -> LoraConfig:
    """In rsLoRA; some parts of each joined matrix have factors, others not."""
    known = {last_name(name) for name in adapted_shapes(architecture)}
    ends = {"q_proj", "v_proj", "up_proj", "gate_up_proj", "in_proj_z", "in_proj_a", "out_proj"}
    return LORA.model_copy(update={"matrices": tuple(known & ends), "rslora": True})


def scale_of(name: str, lora: LoraConfig) -> float:
    rank = 2 if ".experts." in name else 4
    return 8.0 / (rank**0.5 if lora.rslora else rank)


def random_pairs(architecture: Architecture, lora: LoraConfig = LORA) -> Pairs:
    """A random pair of factors for every matrix that has one. In gpt-oss the gate and up matrices
    of an expert share a pair. B is not zero, so that A has a gradient."""
    torch.manual_seed(5)
    size = 0.2 if architecture.delta_net is None else 0.05  # large ones amplify rounding there
    pairs = {}
    for name, (outputs, *inputs) in tensors.hf_shapes(architecture).items():
        is_gate = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight", "router.weight"))
        if ".layers." not in name or len(inputs) != 1 or is_gate:
            continue
        if architecture.family.stacked_experts and ".experts." in name:
            if ".up_proj." in name:
                continue
            if ".gate_proj." in name:
                name, outputs = name.replace("gate_proj", "gate_up_proj"), 2 * outputs
        if lora.matrices and name.split(".")[-2] not in lora.matrices:
            continue
        rank = 2 if ".experts." in name else 4
        pairs[name] = size * torch.randn(rank, *inputs), size * torch.randn(outputs, rank)
    return pairs


def tensors_of(name: str) -> list[str]:
    """The HF tensors whose rows are those of the matrix that a pair adapts."""
    if ".gate_up_proj." not in name:
        return [name]
    return [name.replace("gate_up_proj", kind) for kind in ("gate_proj", "up_proj")]


def adapted(
    architecture: Architecture, world: World, pairs: Pairs, lora: LoraConfig = LORA, **options: Any
) -> list[Any]:
    chunks = build_model(architecture, world, seed=1, **options)
    adapt(chunks, lora)
    fill_factors(chunks, lambda name, which, _: pairs[name][which == "B"])
    return chunks


def merged(
    architecture: Architecture, world: World, pairs: Pairs, lora: LoraConfig = LORA
) -> list[Any]:
    """The full model whose matrices are W + scale · B A."""
    chunks = build_model(architecture, world, seed=1)
    base = {name: tensor.clone() for name, tensor in iter_hf_tensors(chunks)}

    with torch.no_grad():
        for name, (a_RI, b_OR) in pairs.items():
            names = tensors_of(name)
            products = (scale_of(name, lora) * b_OR @ a_RI).chunk(len(names))
            for each, product in zip(names, products, strict=True):
                base[each] += product
        fill_weights(chunks, lambda name, part: base[name][part])
    return chunks


def loss_of(hidden_TH: Tensor, batch: MicroBatch) -> Tensor:
    rows = hidden_TH.index_select(0, batch.rows_N)
    weights = torch.sin(torch.arange(rows.numel(), dtype=torch.float32)).view_as(rows)
    return (rows.float() * weights).sum() + rows.float().square().sum()


def hf_gradients(chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
    for _, weight, entry in described_parameters(chunks):
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        yield from zip(
            entry.hf_names,
            unshard([grad], entry, chunks[0].architecture),
            strict=True,
        )


def projected(full: dict[str, Tensor], pairs: Pairs, lora: LoraConfig = LORA) -> Pairs:
    """The gradients of the factors, from those of the merged matrices."""
    found = {}
    for name, (a_RI, b_OR) in pairs.items():
        gradient_OI = scale_of(name, lora) * torch.cat([full[each] for each in tensors_of(name)])
        found[name] = b_OR.T @ gradient_OI, gradient_OI @ a_RI.T
    return found


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("model_type", "recompute"),
    [*zip(FAMILIES, cycle(["none"])), *zip(FAMILIES, cycle(["selective", "full"]))],
)
def test_factors_compute_what_the_merged_matrices_do(model_type, recompute, world: World) -> None:
    """Without recompute all matrices have factors; with it some have, on rsLoRA's scale."""
    architecture = tiny.architecture(model_type)
    lora = LORA if recompute == "none" else of_some_matrices(architecture)
    pairs = random_pairs(architecture, lora)
    batch = tiny.microbatch([24, 9, 1, 17])
    full = merged(architecture, world, pairs, lora)
    low = adapted(architecture, world, pairs, lora, recompute=recompute)
    outputs = []
    for chunks in (full, low):
        outputs.append(forward_hidden(chunks[0], batch))
        loss_of(outputs[-1], batch).backward()
    tolerance = 10 * tiny.tolerance(architecture)
    close(outputs[1], outputs[0], tolerance)
    expected = projected(dict(hf_gradients(full)), pairs, lora)
    found = 0
    for each in factors_of(low):
        for name, which, rows, own in each.parts():
            whole = expected[name][which == "B"]
            assert own.grad is not None
            close(own.grad, whole[rows], tolerance)
            found += whole[rows].numel()
    assert found == sum(factor.numel() for pair in pairs.values() for factor in pair)
    assert all(weight.grad is None for _, weight, _ in described_parameters(low))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_base_and_merged_tensors(model_type, world: World) -> None:
    architecture = tiny.architecture(model_type)
    pairs, batch = random_pairs(architecture), tiny.microbatch([24, 9])
    base, low = build_model(architecture, world, seed=1), adapted(architecture, world, pairs)
    expected = dict(iter_hf_tensors(merged(architecture, world, pairs)))
    for name, tensor in iter_hf_tensors(low):
        torch.testing.assert_close(tensor, expected[name])
    with base_only(low):
        assert torch.equal(forward_hidden(low[0], batch), forward_hidden(base[0], batch))
        for (name, tensor), (_, own) in zip(
            iter_hf_tensors(low), iter_hf_tensors(base), strict=True
        ):
            assert torch.equal(tensor, own), name
    changed = forward_hidden(low[0], batch)
    assert not torch.equal(changed, forward_hidden(base[0], batch))
    merge(low)
    assert not factors_of(low)
    close(forward_hidden(low[0], batch), changed, 10 * tiny.tolerance(architecture))


@pytest.mark.parametrize("fp8", [None, Fp8("student", "tensorwise")])
def test_new_factors_change_nothing_and_are_drawn_as_peft_draws_them(fp8, world: World) -> None:
    architecture, batch = tiny.architecture("qwen3"), tiny.microbatch([24, 8])
    base, low = (build_model(architecture, world, seed=1, fp8=fp8) for _ in range(2))
    adapt(low, LoraConfig(rank=16, alpha=32))
    assert torch.equal(forward_hidden(low[0], batch), forward_hidden(base[0], batch))
    for factors in factors_of(low):
        for a_RI, b_OR in zip(factors.A, factors.B, strict=True):
            bound = a_RI.shape[1] ** -0.5  # kaiming_uniform_(a=sqrt(5))
            assert 0.9 * bound < a_RI.abs().max() <= bound
            assert float(a_RI.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)
            assert not b_OR.any()


def test_a_norm_that_a_layer_fuses_comes_before_the_factors() -> None:
    """As in Transformer Engine's LayerNormLinear, which is not installed here."""
    layer = Module()
    hidden = torch.randn(5, 8)
    assert _multiplied_input(layer, hidden) is hidden
    layer.layer_norm_weight, layer.eps = torch.randn(8), 1e-6  # pyright: ignore
    plain = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    close(_multiplied_input(layer, hidden), plain * layer.layer_norm_weight)
    layer.zero_centered_gamma = True  # pyright: ignore
    close(_multiplied_input(layer, hidden), plain * (layer.layer_norm_weight + 1))


def test_the_experts_of_one_layer_have_a_pair_each(world: World) -> None:
    """As in Transformer Engine's GroupedLinear, which is not installed here."""
    architecture = tiny.architecture("qwen3_moe")
    pairs = random_pairs(architecture)
    every = factors_of(adapted(architecture, world, pairs))
    downs = [each for each in every if each.entry.layout == "expert_down"][:3]
    hidden, product = torch.randn(7, architecture.ffn_hidden_size), torch.randn(7, 1)
    counts = [4, 0, 3]
    added, bias = add_to_output(downs, Module(), (hidden, counts), (product, None))
    parts = []
    for factors, part in zip(downs, hidden.split(counts), strict=True):
        (name,) = factors.entry.hf_names
        a_RI, b_OR = pairs[name]
        parts.append(part @ a_RI.T @ b_OR.T * scale_of(name, LORA))
    assert bias is None
    close(added, product + torch.cat(parts))


def test_unknown_names_and_stages_without_factors_are_refused(world: World, monkeypatch) -> None:
    chunks = build_model(tiny.architecture("qwen3_5_text"), world)
    for name in ("qkv_proj", "mlp.o_proj", "proj", "lm_head"):
        with pytest.raises(UserError, match=rf"'{name}' names no matrix .* choose among down_proj"):
            adapt(chunks, LoraConfig(matrices=("q_proj", name)))
    monkeypatch.setattr(chunks[0].pg_collection, "pp", SimpleNamespace(size=lambda: 4))
    with pytest.raises(UserError, match=r"no layer of pipeline stage 0 has such a matrix"):
        adapt(chunks, LoraConfig(matrices=("q_proj", "self_attn.o_proj")))
    adapt(chunks, LoraConfig(matrices=("q_proj",)), is_trained=False)
    monkeypatch.undo()  # one stage
    chunks = build_model(tiny.architecture("qwen3_5_text"), world)
    adapt(chunks, LoraConfig(matrices=("q_proj", "self_attn.o_proj")))


def test_a_matrix_of_another_kind_is_refused(world: World, monkeypatch) -> None:
    chunks = build_model(tiny.architecture("qwen3"), world)
    monkeypatch.setattr(lora, "LAYOUTS", ("qkv",))
    with pytest.raises(
        UserError, match=r"o_proj.weight is of a kind \(columns\) .* student.lora=null"
    ):
        adapt(chunks, LoraConfig(rank=4, alpha=8))
