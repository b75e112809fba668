"""Layouts that cannot hold a model are refused with both numbers and a remedy."""

from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.models import gpt
from stable_opd_mcore.models.files.megatron_checkpoint import weights_of
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.parallel.world import World
from tests.models import tiny


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_size": 4}, r"parallel.tensor=4 does not divide num_key_value_heads=2 .*\[1, 2\]"),
        ({"tensor_size": 3}, "parallel.tensor=3 does not divide num_attention_heads=4"),
        ({"pipeline_size": 3}, r"4 layers do not divide .*pipeline=3 .* among \[1, 2, 4\]"),
        ({"pipeline_size": 4, "virtual_pipeline": 2}, "= 8 stages"),
    ],
)
def test_layout_that_cannot_hold_the_model_is_refused(
    layout: dict, message: str, world: World
) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(tiny.architecture("qwen3"), replace(world, **layout))


def test_gated_delta_nets_refuse_context_parallelism_and_too_many_ranks(world: World) -> None:
    hybrid = tiny.architecture("qwen3_5", num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"parallel.context=2: a gated delta net .*context=1"):
        build_model(hybrid, replace(world, context_size=2))
    with pytest.raises(ValueError, match=r"parallel\.tensor=4 does not divide linear_num_key"):
        build_model(hybrid, replace(world, tensor_size=4))


def test_sinks_refuse_context_parallelism_and_fp8(world: World) -> None:
    sinks = tiny.architecture("gpt_oss")
    with pytest.raises(ValueError, match=r"parallel.context=2: an attention sink .*context=1"):
        build_model(sinks, replace(world, context_size=2))
    with pytest.raises(ValueError, match=r"the experts of this gpt_oss model .*fp8.student=null"):
        build_model(sinks, world, fp8=Fp8("student", "tensorwise"))


def test_context_parallelism_in_fp32_is_refused_with_transformer_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "transformer_engine_is_usable", lambda: True)
    with pytest.raises(ValueError, match=r"parallel.context=2 with train.precision=fp32"):
        build_model(tiny.architecture("qwen3"), replace(world, context_size=2))


def test_frozen_model_has_no_gradients(world: World) -> None:
    frozen = build_model(tiny.architecture("qwen3"), world, trainable=False)
    assert not forward_hidden(frozen[0], tiny.microbatch([4, 3])).requires_grad
    assert not frozen[0].training


def test_an_activation_that_is_a_module_does_not_hinder_a_checkpoint(world: World) -> None:
    chunks = build_model(tiny.architecture("qwen3"), world)
    expected = set(weights_of(chunks)["model0"])
    for layer in chunks[0].decoder.layers:
        layer.mlp.activation_func = torch.nn.SiLU()
    gpt.leave_out_activations(chunks[0])
    assert set(weights_of(chunks)["model0"]) == expected


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_of_experts_keeps_nothing_of_a_micro_batch(world: World, recompute) -> None:
    (chunk,) = build_model(tiny.architecture("qwen3_moe"), world, recompute=recompute)
    dispatchers = [layer.mlp.token_dispatcher for layer in chunk.decoder.layers]
    constant = [_tensors(dispatcher) for dispatcher in dispatchers]
    batch = tiny.microbatch([50, 60])
    forward_hidden(chunk, batch).sum().backward()
    for dispatcher, before in zip(dispatchers, constant, strict=True):
        kept = {key: t for key, t in _tensors(dispatcher).items() if key not in before}
        assert all(tensor.grad_fn is None for tensor in kept.values()), kept
        assert sum(tensor.numel() for tensor in kept.values()) < batch.tokens_T.numel(), kept


def _tensors(module: object) -> dict[str, torch.Tensor]:
    return {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
