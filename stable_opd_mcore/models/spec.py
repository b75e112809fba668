"""The layers of a model: Transformer Engine's where it and CUDA are available, else torch's.

Megatron maps the parameter names of both to the same names in checkpoints, so a checkpoint of one
loads in the other. Not here: sizes and parallel layout (gpt.py), the torch attention
(attention.py).
"""

from __future__ import annotations

import importlib.util
from copy import deepcopy
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
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.models.attention import RMSNorm, TorchSelfAttention
from stable_opd_mcore.models.fp8 import is_in_fp8
from stable_opd_mcore.models.fp8_emulation import EmulatedColumnLinear, EmulatedRowLinear
from stable_opd_mcore.models.linear import TorchColumnLinear, TorchRowLinear


def transformer_engine_is_usable() -> bool:
    """Whether CUDA is available and the package is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def fp8_engine() -> str:
    """What computes in FP8 in this process, as a line at a run's start."""
    if transformer_engine_is_usable():
        return "FP8 by Transformer Engine"
    return "FP8 emulated, because Transformer Engine is absent: slower than without FP8"


def layer_spec(
    config: TransformerConfig, vp_stage: int | None, pipeline_rank: int, fp8: Fp8 | None
) -> Any:
    """The `transformer_layer_spec` of GPTModel for one model chunk.

    Args:
        fp8: of the torch layers; with Transformer Engine `config` has it.
    """
    if transformer_engine_is_usable():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            use_te_activation_func=config.use_te_activation_func,
        )
    return _torch_block_spec(config, vp_stage, pipeline_rank, fp8)


def _torch_block_spec(
    config: TransformerConfig, vp_stage: int | None, pipeline_rank: int, fp8: Fp8 | None
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
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    layer = _with_linears(layer, TorchColumnLinear, TorchRowLinear)
    emulated = _with_linears(layer, EmulatedColumnLinear, EmulatedRowLinear)
    layers = [
        emulated if fp8 and is_in_fp8(fp8, first + i, config.num_layers) else layer
        for i in range(num_layers)
    ]
    # Without `layer_norm` the block takes Apex's or Megatron's final norm.
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _with_linears(layer: Any, column: type, row: type) -> Any:
    """A copy of a layer's spec with these classes for the matrices of attention, MLP and experts.

    The first of a matrix and the next has its rows on the tensor ranks, the second its columns.
    """
    layer = deepcopy(layer)
    attention, mlp = layer.submodules.self_attention.submodules, _submodules(layer.submodules.mlp)
    attention.linear_qkv, attention.linear_proj = column, row
    if hasattr(mlp, "experts"):
        mlp = _submodules(mlp.experts)
    mlp.linear_fc1, mlp.linear_fc2 = column, row
    return layer


def _submodules(spec: Any) -> Any:
    """Of an MLP or of experts, which newer releases of Megatron describe by a partial function."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
