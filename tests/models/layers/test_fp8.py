"""Models that FP8 refuses, and the settings that Megatron gets."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers.fp8 import (
    megatron_settings,
    refuse_fp8,
    refuse_fp8_on_device,
)
from tests.models import tiny

FITS = tiny.architecture("qwen3", head_dim=16)
EXPERTS = tiny.architecture("qwen3_moe", head_dim=16, moe_intermediate_size=32)


@pytest.mark.parametrize(
    ("architecture", "fp8", "tensor", "message"),
    [
        (FITS, Fp8("teacher", "blockwise"), 1, None),
        (FITS, Fp8("student", "tensorwise"), 1, None),
        (EXPERTS, Fp8("teacher", "tensorwise"), 2, None),
        (FITS, Fp8("teacher", "blockwise"), 2, r"mlp\.down_proj\.weight is 32 x 24 on a rank"),
        (
            tiny.architecture("qwen3", head_dim=16, hidden_size=40),
            Fp8("teacher", "tensorwise"),
            1,
            r"fp8.teacher=tensorwise: .*q_proj.* \+ .* x 40 on a rank .* multiples of 16",
        ),
    ],
)
def test_what_cannot_work_is_refused(architecture, fp8, tensor, message):
    with pytest.raises(UserError, match=message) if message else nullcontext():
        refuse_fp8(architecture, fp8, tensor=tensor, precision=None)
    if message and tensor > 1:
        refuse_fp8(architecture, fp8, tensor=1, precision=None)


def test_transformer_engine_has_fp8_only_with_bf16():
    settings = (FITS, Fp8("teacher", "blockwise"))
    refuse_fp8(*settings, tensor=1, precision="bf16")
    with pytest.raises(UserError, match=r"train.precision=fp32: .* set train.precision=bf16"):
        refuse_fp8(*settings, tensor=1, precision="fp32")


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "message"),
    [
        ("blockwise", (9, 0), "12.9", None),
        ("tensorwise", (8, 9), "12.4", None),
        ("tensorwise", (8, 0), "12.9", "capability 8.0, and the recipe needs 8.9"),
        ("blockwise", (8, 9), "12.9", "capability 8.9, and the recipe needs 9.0"),
        ("blockwise", (9, 0), "12.8", "CUDA 12.8, and the recipe needs 12.9"),
    ],
)
def test_gpus_without_the_recipe_are_refused(recipe, capability, cuda, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        refuse_fp8_on_device(Fp8("student", recipe))


@pytest.mark.parametrize(("recipe", "trainable"), [("tensorwise", True), ("blockwise", False)])
def test_megatron_takes_the_settings(recipe, trainable):
    """Its own checks pass, and every name exists."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        **megatron_settings(Fp8("student", recipe), trainable=trainable),
    )
    assert config.fp8 == ("e4m3" if recipe == "blockwise" else "hybrid")
    assert config.fp8_param != trainable


def test_a_model_refuses_sizes_and_tokens_that_do_not_divide(world):
    fp8 = Fp8("student", "tensorwise")
    with pytest.raises(UserError, match=r"down_proj\.weight is 32 x 24"):
        build_model(FITS, replace(world, tensor_size=2), fp8=fp8)
    chunks = build_model(FITS, world, fp8=fp8)
    with pytest.raises(ValueError, match=r"30 tokens .* multiple of 16"):
        forward_hidden(chunks[0], tiny.microbatch([10, 20]))
