"""The layers of a model: Transformer Engine's where it and CUDA are available, else torch's.

Megatron maps the parameter names of both to the same names in checkpoints, so a checkpoint of one
loads in the other.
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.layers.attention import (
    NormedSum,
    RMSNorm,
    StackedRotarySelfAttention,
    TorchSelfAttention,
    ZeroCentredRMSNorm,
)
from stable_opd_mcore.models.layers.attention_sinks import AttentionSinks
from stable_opd_mcore.models.layers.gated_delta_net import DeltaNetSubmodules, GatedDeltaNet
from stable_opd_mcore.models.layers.latent_attention import LatentAttention, LatentSubmodules
from stable_opd_mcore.models.layers.linear import TorchColumnLinear, TorchRowLinear, biased
from stable_opd_mcore.models.layers.scored_router import ScoredRouter


def transformer_engine_is_usable() -> bool:
    """Whether CUDA is available and the package is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def fp8_engine() -> str:
    """What computes in FP8 in this process, as a line at a run's start."""
    if transformer_engine_is_usable():
        return "FP8 by Transformer Engine"
    return "FP8 emulated, because Transformer Engine is absent: slower than without FP8"


def layer_spec(
    config: TransformerConfig,
    architecture: Architecture,
    vp_stage: int | None,
    pipeline_rank: int,
) -> Any:
    """The `transformer_layer_spec` of GPTModel for one model chunk."""
    fused = transformer_engine_is_usable()
    layer, linear, norm = _layer(config, architecture)
    if architecture.output_bias and not architecture.family.biases:
        attention = layer.submodules.self_attention.submodules
        attention.linear_proj = biased(attention.linear_proj)
    if architecture.family.norms_after:
        after = ModuleSpec(module=NormedSum, params={"config": config, "norm": norm})
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = after
    if fused and architecture.local_rotary is not None:
        layer.submodules.self_attention.module = StackedRotarySelfAttention
    if architecture.family.scored_router:
        assert architecture.experts is not None, "its families have experts"
        router = partial(ScoredRouter, experts=architecture.experts)
        _submodules(layer.submodules.mlp).router = router
    if architecture.latent is not None:
        _give_latent_attention(layer, architecture, linear, norm)
    if fused and not architecture.has_unlike_layers:
        return layer
    dense = layer
    if architecture.num_dense_layers:
        dense = deepcopy(layer)
        other = _layer(config, architecture, of_experts=False)[0].submodules
        dense.submodules.mlp, dense.submodules.pre_mlp_layernorm = (
            other.mlp,
            other.pre_mlp_layernorm,
        )
        names = other.sharded_state_dict_keys_map  # in checkpoints; attention keeps the layer's
        names.pop("input_layernorm.", None)
        dense.submodules.sharded_state_dict_keys_map |= names
    number = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    first = get_transformer_layer_offset(config, vp_stage, pipeline_rank)
    layers = [
        _with_delta_net(layer, architecture, linear, norm)
        if first + i in architecture.delta_layers
        else dense
        if first + i < architecture.num_dense_layers
        else layer
        for i in range(number)
    ]
    # Without `layer_norm` the block takes Apex's or Megatron's final norm.
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer(
    config: TransformerConfig, architecture: Architecture, *, of_experts: bool = True
) -> tuple[Any, DeltaNetSubmodules, Any]:
    """A layer, its engine's linear layers and norm.

    of_experts: the layer has experts if the model has any.
    """
    num_experts = config.num_moe_experts if of_experts else None
    if transformer_engine_is_usable():
        return _te_layer(config, num_experts)
    return _torch_layer(config, architecture, num_experts)


def _te_layer(
    config: TransformerConfig, num_experts: int | None
) -> tuple[Any, DeltaNetSubmodules, Any]:
    """A layer of Transformer Engine, its linear layers and its norm."""
    from megatron.core.extensions import transformer_engine as extension

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=num_experts is not None and config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        use_te_activation_func=config.use_te_activation_func,
    )
    linear = DeltaNetSubmodules(extension.TEColumnParallelLinear, extension.TERowParallelLinear)
    return layer, linear, extension.TENorm


def _with_delta_net(
    layer: Any, architecture: Architecture, linear: DeltaNetSubmodules, norm: Any
) -> Any:
    """The same layer with a gated delta net instead of attention, and a norm of its own before it,
    under its own name in checkpoints."""
    layer = deepcopy(layer)
    _norm_before(layer, norm)
    layer.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet, params={"net": architecture.delta_net}, submodules=linear
    )
    return layer


def _give_latent_attention(
    layer: Any, architecture: Architecture, linear: DeltaNetSubmodules, norm: Any
) -> None:
    """Replace the layer's attention, with a norm before it under its own name in checkpoints."""
    core = None
    if transformer_engine_is_usable():
        core = layer.submodules.self_attention.submodules.core_attention
    _norm_before(layer, norm)
    # The latents' norms multiply by their weights, as all norms of these families do.
    layers = LatentSubmodules(linear.in_proj, linear.out_proj, norm, core)
    layer.submodules.self_attention = ModuleSpec(
        module=LatentAttention, params={"architecture": architecture}, submodules=layers
    )


def _norm_before(layer: Any, norm: Any) -> None:
    layer.submodules.input_layernorm = norm
    layer.submodules.sharded_state_dict_keys_map.pop("input_layernorm.", None)


def _torch_layer(
    config: TransformerConfig, architecture: Architecture, num_experts: int | None
) -> tuple[Any, DeltaNetSubmodules, Any]:
    """A layer in plain torch, its linear layers and its norm."""
    layer: Any = get_gpt_layer_local_spec(
        num_experts=num_experts,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    norm: Any = ZeroCentredRMSNorm if architecture.family.zero_centred_norms else RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if num_experts is not None:
        # In checkpoints this norm has the name of a dense MLP's. Transformer Engine's experts have
        # it under its own name, because they fuse no norm.
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    layer.submodules.self_attention.module = TorchSelfAttention
    attention = layer.submodules.self_attention.submodules
    # TorchSelfAttention computes the attention itself and only needs the layer's sinks.
    attention.core_attention = AttentionSinks if architecture.family.sinks else IdentityOp
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    attention.linear_qkv, attention.linear_proj = TorchColumnLinear, TorchRowLinear
    mlps = [layer.submodules.mlp]
    if num_experts is not None:
        of_experts: Any = _submodules(layer.submodules.mlp)
        mlps = [of_experts.experts, of_experts.shared_experts]
    for mlp in map(_submodules, mlps):
        mlp.linear_fc1, mlp.linear_fc2 = TorchColumnLinear, TorchRowLinear
    return layer, DeltaNetSubmodules(TorchColumnLinear, TorchRowLinear), norm


def _submodules(spec: Any) -> Any:
    """The parts of an MLP or of experts. Newer releases of Megatron describe them by a partial."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
