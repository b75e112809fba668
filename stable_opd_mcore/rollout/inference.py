"""Megatron's layers without what only training needs, for the embedded engine.

    with inference_mode(chunks):
        hidden_TBH = run_layers(chunk, hidden_TBH, cache)

A decoding step multiplies a few rows, so wrappers took half of a small model's time on a CPU.
Layers therefore run without the wrappers of Megatron's model (dropout, biases, checks, inference
context), and torch's linear layers without autograd functions.

Shapes: T new tokens of B rows, H hidden size, G key-value groups of this tensor rank with R query
heads each, D head size, E = D times the query heads of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.layers.attention import NormedSum, TorchSelfAttention
from stable_opd_mcore.models.layers.attention_sinks import sinks_of, window_of
from stable_opd_mcore.models.layers.gated_delta_net import GatedDeltaNet
from stable_opd_mcore.models.layers.latent_attention import LatentAttention
from stable_opd_mcore.models.layers.linear import linear
from stable_opd_mcore.rollout.kv_cache import KVCache

_FEW_ROWS = 256


@contextmanager
def inference_mode(chunks: Sequence[HiddenStatesGPTModel]) -> Iterator[None]:
    """Torch's inference mode, and evaluation mode without sequence parallelism, which cannot cut
    one token, nor FP8, whose products need 16: as servers do, the engine samples in the weights'
    own precision.

    On exit, modes, flags and every replaced `forward` are restored.
    """
    training = [chunk.training for chunk in chunks]
    fp8: list[Any] = [chunk.config.fp8 for chunk in chunks]
    modules = [module for chunk in chunks for module in chunk.modules()]
    flags: list[tuple[Any, str]] = []
    for module in modules:
        flags += _switched_off(module) + _switched_off(getattr(module, "config", None))
    for chunk in chunks:
        for module in chunk.decoder.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                vars(module)["forward"] = partial(_linear_forward, module)
        chunk.eval()
        chunk.config.fp8 = None
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)
        for owner, name in flags:
            setattr(owner, name, True)
        for chunk, mode, recipe in zip(chunks, training, fp8, strict=True):
            chunk.train(mode)
            chunk.config.fp8 = recipe


def run_layers(chunk: HiddenStatesGPTModel, hidden_TBH: Tensor, cache: KVCache) -> Tensor:
    """The chunk's layers and its final norm. No family has a bias that is added after the MLP."""
    layers: Any = chunk.decoder.layers
    for layer in layers:
        mix = _MIXERS.get(type(layer.self_attention), _attention)
        mixed_TBH = mix(layer.self_attention, layer.input_layernorm(hidden_TBH), cache)
        hidden_TBH = hidden_TBH + _added(layer.self_attn_bda, mixed_TBH)
        output_TBH = layer.mlp.forward(layer.pre_mlp_layernorm(hidden_TBH))[0]
        hidden_TBH = hidden_TBH + _added(layer.mlp_bda, output_TBH)
    norm = chunk.decoder.final_layernorm
    return hidden_TBH if norm is None else norm(hidden_TBH)


def _added(into_sum: Any, output_TBH: Tensor) -> Tensor:
    """What a layer adds of the output of its attention or MLP."""
    return into_sum.norm(output_TBH) if isinstance(into_sum, NormedSum) else output_TBH


def _attention(attention: SelfAttention, hidden_TBH: Tensor, cache: KVCache) -> Tensor:
    queries_and_keys, values, gates_TBE = _heads(attention, hidden_TBH)
    mixed_TBE = cache.attend(
        attention.layer_number,
        queries_and_keys,
        values,
        attention.config.softmax_scale,
        rotary=cast(TorchSelfAttention, attention).rotary,
        sinks=sinks_of(attention),
        window=window_of(attention),
    )
    if gates_TBE is not None:
        mixed_TBE = mixed_TBE * gates_TBE.sigmoid()
    output_TBH, bias_H = attention.linear_proj(mixed_TBE)
    return output_TBH if bias_H is None else output_TBH + bias_H


def _delta_net(net: GatedDeltaNet, hidden_TBH: Tensor, cache: KVCache) -> Tensor:
    inputs, gates, decay, beta = net.projected(hidden_TBH)
    # Padding is 0, with which it neither decays nor changes a state.
    inputs, decay, beta = (cache.without_padding(x).transpose(0, 1) for x in (inputs, decay, beta))
    before = cache.states.get(net.layer_number)
    mixed, cache.states[net.layer_number] = net.mixed(inputs, decay, beta, before)
    return net.finished(mixed.transpose(0, 1), gates)[0]


def _latent_attention(attention: LatentAttention, hidden_TBH: Tensor, cache: KVCache) -> Tensor:
    queries, latents, shared_key = attention.projected(hidden_TBH)
    number = attention.layer_number
    if number not in cache.latent_weights:
        cache.latent_weights[number] = attention.key_value_weights()
    weights_LAX = cache.latent_weights[number]
    keys = torch.cat((shared_key, latents.unsqueeze(-2)), dim=-1)
    heads = torch.cat((attention.absorbed(queries, weights_LAX), keys), dim=-2)
    mixed = cache.attend(number, heads.unsqueeze(2), None, attention.scale, rotary=attention.rotary)
    of_heads = mixed.unflatten(-1, (attention.num_heads, -1))
    return attention.linear_proj(attention.values_of(of_heads, weights_LAX))[0]


_MIXERS: dict[type[Any], Any] = {GatedDeltaNet: _delta_net, LatentAttention: _latent_attention}


def _heads(attention: SelfAttention, hidden_TBH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries and keys [T, B, G, R+1, D] and values [T, B, G, D], as KVCache takes them; and
    the output's gates, None where the family has none."""
    G, D = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    groups_in_all: Any = attention.config.num_query_groups
    if attention.config.qk_layernorm or groups_in_all < attention.world_size:
        is_gated: bool = attention.config.attention_output_gate
        separate: Any = attention.get_query_key_value_tensors(hidden_TBH, output_gate=is_gated)
        queries, keys, values_TBGD, *gates = separate
        grouped = queries.unflatten(2, (G, -1))
        of_outputs = gates[0].flatten(2) if gates else None
        return torch.cat((grouped, keys.unsqueeze(3)), dim=3), values_TBGD, of_outputs
    layer: Any = attention.linear_qkv
    heads, _ = layer(hidden_TBH)
    heads = heads.view(*hidden_TBH.shape[:2], G, -1, D)
    return heads[..., :-1, :], heads[..., -1, :], None


def _linear_forward(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Megatron's parallel linear without autograd functions: output, and the bias if skipped."""
    bias = layer.bias
    output = product(hidden, layer.weight, None if layer.skip_bias_add else bias)
    group = layer.tp_group
    if isinstance(layer, RowParallelLinear) and group.size() > 1:
        dist.all_reduce(output, group=group)
    return output, bias if layer.skip_bias_add else None


def product(hidden: Tensor, weight_OH: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear`, but a few rows are multiplied by the weights as they lie in memory: oneDNN copies
    them for each product, which takes longer than to multiply (BENCHMARKS.md)."""
    is_small = hidden.shape[:-1].numel() <= _FEW_ROWS
    return (F.linear if is_small else linear)(hidden, weight_OH, bias_O)


def _switched_off(owner: Any) -> list[tuple[Any, str]]:
    """Set a module's or config's sequence-parallel flags to False; returns those that were True."""
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    flags = [(owner, name) for name in names if getattr(owner, name, False) is True]
    for _, name in flags:
        setattr(owner, name, False)
    return flags
