"""The layers of a model: Transformer Engine's where it and CUDA are available, else torch's.

Megatron maps the parameter names of both to the same names in checkpoints, so a checkpoint of one
loads in the other. Not here: sizes and parallel layout (build.py), the torch attention
(attention.py).
"""

from __future__ import annotations

import importlib.util
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


def transformer_engine_is_usable() -> bool:
    """Whether CUDA is available and the package is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def layer_spec(config: TransformerConfig, vp_stage: int | None, pipeline_rank: int) -> Any:
    """The `transformer_layer_spec` of GPTModel for one model chunk."""
    if transformer_engine_is_usable():
        return get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, use_te_activation_func=config.use_te_activation_func
        )
    return _torch_block_spec(config, vp_stage, pipeline_rank)


def _torch_block_spec(
    config: TransformerConfig, vp_stage: int | None, pipeline_rank: int
) -> TransformerBlockSubmodules:
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    norm: Any = RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.module = TorchSelfAttention
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = IdentityOp  # TorchSelfAttention has it built in
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    # Without `layer_norm` the block takes Apex's or Megatron's final norm.
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
