"""The layers of a model: Transformer Engine's where it and CUDA are available, else torch's.

Megatron maps the parameter names of both to the same names in checkpoints, so a checkpoint of one
loads in the other.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from stable_opd_mcore.models.attention import RMSNorm, TorchSelfAttention
from stable_opd_mcore.models.linear import TorchColumnLinear, TorchRowLinear


def transformer_engine_is_usable() -> bool:
    """Whether CUDA is available and the package is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def fp8_engine() -> str:
    """What computes in FP8 in this process, as a line at a run's start."""
    if transformer_engine_is_usable():
        return "FP8 by Transformer Engine"
    return "FP8 emulated, because Transformer Engine is absent: slower than without FP8"


def layer_spec(config: TransformerConfig, vp_stage: int | None, pipeline_rank: int) -> Any:
    """The `transformer_layer_spec` of GPTModel for one model chunk."""
    if transformer_engine_is_usable():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            use_te_activation_func=config.use_te_activation_func,
        )
    return _torch_block_spec(config, vp_stage, pipeline_rank)


def _torch_block_spec(
    config: TransformerConfig, vp_stage: int | None, pipeline_rank: int
) -> TransformerBlockSubmodules:
    layer: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    norm: Any = RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if config.num_moe_experts is not None:
        # In checkpoints this norm has the name of a dense MLP's. Transformer Engine's experts have
        # it under its own name, because they fuse no norm.
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    layer.submodules.self_attention.module = TorchSelfAttention
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = IdentityOp  # TorchSelfAttention has it built in
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    attention.linear_qkv, attention.linear_proj = TorchColumnLinear, TorchRowLinear
    mlp = _submodules(layer.submodules.mlp)
    if config.num_moe_experts is not None:
        mlp = _submodules(mlp.experts)
    mlp.linear_fc1, mlp.linear_fc2 = TorchColumnLinear, TorchRowLinear
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    # Without `layer_norm` the block takes Apex's or Megatron's final norm.
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def _submodules(spec: Any) -> Any:
    """The parts of an MLP or of experts. Newer releases of Megatron describe them by a partial."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
