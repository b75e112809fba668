"""The table of Hugging Face's tensors and Megatron's parameters, read in both directions.

One to three HF tensors make up a parameter in one of the layouts below, which is then cut over the
tensor ranks. An expert is not cut: one expert-parallel rank holds it whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from stable_opd_mcore.models.description.architecture import Architecture

# whole: the same on every rank
# replicated: so too, of a matrix that multiplies a rank's tokens
# rows, columns: cut along dimension 0, 1
# qkv: heads interleaved by key-value group, then cut
# gated_qkv: qkv where q_proj holds a query and a gate for each head; a parameter has all queries of
#   a group, then all its gates
# delta_qkvz, delta_qkv, delta_ba: parts of a gated delta net, interleaved by key head, then cut
# gate_up: each half cut, then joined
# vocab: rows padded to a multiple of the ranks, then cut
# expert_gate_up, expert_down: one expert's, on the expert-parallel rank that holds it; a bias has
#   its matrix's layout
Grouped = Literal["qkv", "gated_qkv", "delta_qkvz", "delta_qkv", "delta_ba"]
Layout = (
    Grouped
    | Literal["whole", "replicated", "rows", "columns", "gate_up", "vocab"]
    | Literal["expert_gate_up", "expert_down"]
)


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter before it is cut: its HF tensors and its layout."""

    hf_names: tuple[str, ...]
    layout: Layout
    fp32: bool = False  # in fp32 even in a bf16 model
    is_fixed: bool = False  # never trained

    @property
    def is_cut(self) -> bool:
        """Whether a tensor rank has only a part."""
        return self.layout not in ("whole", "replicated") and not self.is_expert

    @property
    def is_expert(self) -> bool:
        return self.layout.startswith("expert")


HEAD = "lm_head.weight"
_TOP: dict[str, Parameter] = {  # the family's prefix is left out of the first two
    "embedding.word_embeddings.weight": Parameter(("embed_tokens.weight",), "vocab"),
    "decoder.final_layernorm.weight": Parameter(("norm.weight",), "whole"),
    "output_layer.weight": Parameter((HEAD,), "vocab"),
}
_INPUT_NORM = Parameter(("input_layernorm.weight",), "whole")
_MLP_NORM = Parameter(("post_attention_layernorm.weight",), "whole")
_LAYER: dict[str, Parameter] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,  # Transformer Engine's fused name
    "self_attention.linear_qkv.weight": Parameter(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), "qkv"
    ),
    "self_attention.linear_qkv.bias": Parameter(
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), "qkv"
    ),
    "self_attention.q_layernorm.weight": Parameter(("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": Parameter(("self_attn.k_norm.weight",), "whole"),
    "self_attention.core_attention.softmax_offset": Parameter(("self_attn.sinks",), "rows"),
    "self_attention.linear_proj.weight": Parameter(("self_attn.o_proj.weight",), "columns"),
    "self_attention.linear_proj.bias": Parameter(("self_attn.o_proj.bias",), "whole"),
    "self_attention.in_proj.weight": Parameter(
        ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"), "delta_qkvz"
    ),
    "self_attention.in_proj_ba.weight": Parameter(
        ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"), "delta_ba"
    ),
    "self_attention.conv_weight": Parameter(("linear_attn.conv1d.weight",), "delta_qkv"),
    "self_attention.dt_bias": Parameter(("linear_attn.dt_bias",), "rows"),
    "self_attention.A_log": Parameter(("linear_attn.A_log",), "rows", fp32=True),
    "self_attention.norm_weight": Parameter(("linear_attn.norm.weight",), "whole", fp32=True),
    "self_attention.out_proj.weight": Parameter(("linear_attn.out_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": Parameter(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": Parameter(("mlp.down_proj.weight",), "columns"),
    "self_attention.q_down.weight": Parameter(("self_attn.q_a_proj.weight",), "replicated"),
    "self_attention.kv_down.weight": Parameter(
        ("self_attn.kv_a_proj_with_mqa.weight",), "replicated"
    ),
    "self_attention.q_norm.weight": Parameter(("self_attn.q_a_layernorm.weight",), "whole"),
    "self_attention.kv_norm.weight": Parameter(("self_attn.kv_a_layernorm.weight",), "whole"),
    "self_attention.q_up.weight": Parameter(("self_attn.q_b_proj.weight",), "rows"),
    "self_attention.kv_up.weight": Parameter(("self_attn.kv_b_proj.weight",), "rows"),
    "mlp.router.weight": Parameter(("mlp.gate.weight",), "whole"),
    "mlp.router.choice_bias": Parameter(
        ("mlp.gate.e_score_correction_bias",), "whole", fp32=True, is_fixed=True
    ),
    "mlp.shared_experts.linear_fc1.weight": Parameter(
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"), "gate_up"
    ),
    "mlp.shared_experts.linear_fc2.weight": Parameter(
        ("mlp.shared_expert.down_proj.weight",), "columns"
    ),
    "mlp.shared_experts.gate_weight": Parameter(("mlp.shared_expert_gate.weight",), "whole"),
}
# Where files join a delta net's projections, these are already interleaved by key head.
_JOINED_DELTA_NET = {
    "self_attention.in_proj.weight": Parameter(("linear_attn.in_proj_qkvz.weight",), "rows"),
    "self_attention.in_proj_ba.weight": Parameter(("linear_attn.in_proj_ba.weight",), "rows"),
}
# The router has another name in the files of families whose router has a bias.
_ROUTER_WITH_BIAS = {
    name: Parameter((name,), "whole") for name in ("mlp.router.weight", "mlp.router.bias")
}
# Norms after attention and MLP change the name of the one before the MLP.
_NORMS_AFTER = {
    "self_attn_bda.norm.weight": _MLP_NORM,
    "pre_mlp_layernorm.weight": Parameter(("pre_feedforward_layernorm.weight",), "whole"),
    "mlp.linear_fc1.layer_norm_weight": Parameter(("pre_feedforward_layernorm.weight",), "whole"),
    "mlp_bda.norm.weight": Parameter(("post_feedforward_layernorm.weight",), "whole"),
}
_QUERIES_OF_TOKENS = Parameter(("self_attn.q_proj.weight",), "rows")  # without a latent
# Both products that give latents are next to each other: SGLang wants them in one message.
_LATENT = [f"self_attention.{name}.weight" for name in (
    "q_down", "kv_down", "q_norm", "q_up", "kv_norm", "kv_up", "linear_proj",
)]  # fmt: skip
_DELTA_NET = [f"self_attention.{name}" for name in (
    "in_proj.weight", "in_proj_ba.weight", "conv_weight", "dt_bias", "A_log", "norm_weight",
    "out_proj.weight",
)]  # fmt: skip
_SHARED_EXPERT = [name for name in _LAYER if name.startswith("mlp.shared_experts.")]
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAMES = (
    re.compile(
        r"mlp\.experts\.local_experts\.(?P<index>\d+)\.linear_(?P<end>fc[12]\.(weight|bias))"
    ),
    # Transformer Engine's layer of several experts
    re.compile(r"mlp\.experts\.linear_(?P<end>fc[12]\.(weight|bias))(?P<index>\d+)"),
)


def _expert(index: int, architecture: Architecture) -> dict[str, Parameter]:
    """The parameters of an expert of a layer, by the end of Megatron's name."""
    parameters: dict[str, Parameter] = {}
    for kind in ("weight", *(["bias"] if architecture.family.biases else [])):
        gate, up, down = (f"mlp.experts.{index}.{x}_proj.{kind}" for x in ("gate", "up", "down"))
        parameters[f"fc1.{kind}"] = Parameter((gate, up), "expert_gate_up")
        parameters[f"fc2.{kind}"] = Parameter((down,), "expert_down")
    return parameters


def _layer_entry(name: str, architecture: Architecture, first_expert: int = 0) -> Parameter:
    for pattern in _EXPERT_NAMES:
        if match := pattern.fullmatch(name):
            return _expert(first_expert + int(match["index"]), architecture)[match["end"]]
    if name in _ROUTER_WITH_BIAS and architecture.family.biases:
        return _ROUTER_WITH_BIAS[name]
    if name == "self_attention.q_up.weight" and not (
        architecture.latent and architecture.latent.query_rank
    ):
        return _QUERIES_OF_TOKENS
    if name in _NORMS_AFTER and architecture.family.norms_after:
        return _NORMS_AFTER[name]
    entry = _LAYER[name]
    if architecture.family.joined_delta_nets:
        entry = _JOINED_DELTA_NET.get(name, entry)
    if name in _SHARED_EXPERT and architecture.family.shared_name != "shared_expert":
        shared = f".{architecture.family.shared_name}."
        entry = replace(
            entry, hf_names=tuple(x.replace(".shared_expert.", shared) for x in entry.hf_names)
        )
    is_gated = entry.layout == "qkv" and architecture.family.gated_attention
    return replace(entry, layout="gated_qkv") if is_gated else entry


def describe(
    name: str, layer_numbers: Sequence[int], architecture: Architecture, first_expert: int = 0
) -> Parameter:
    """The table's entry for a parameter of a model chunk.

    Args:
        name: the name in `named_parameters` of the chunk.
        layer_numbers: the model-wide index, from 0, of each of the chunk's layers.
        first_expert: the model-wide index of this expert-parallel rank's first expert.
    """
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        if architecture.tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        return _at_top(name, architecture)
    entry = _layer_entry(match[2], architecture, first_expert)
    return _in_layer(entry, layer_numbers[int(match[1])], architecture)


def _at_top(name: str, architecture: Architecture) -> Parameter:
    entry = _TOP[name]
    if entry.hf_names == (HEAD,):
        return entry
    return replace(entry, hf_names=(architecture.family.prefix + entry.hf_names[0],))


def _in_layer(entry: Parameter, number: int, architecture: Architecture) -> Parameter:
    """The entry of a layer's table with the full names of its HF tensors."""
    prefix = f"{architecture.family.prefix}layers.{number}."
    return replace(entry, hf_names=tuple(prefix + name for name in entry.hf_names))


def canonical_parameters(architecture: Architecture) -> list[Parameter]:
    """Every parameter of the whole model, in the order of the forward pass."""
    embedding, norm, head = (_at_top(name, architecture) for name in _TOP)
    numbers = range(architecture.num_layers)
    layers = chain.from_iterable(layer_parameters(architecture, number) for number in numbers)
    return [embedding, *layers, norm, *([] if architecture.tied else [head])]


def layer_parameters(architecture: Architecture, number: int) -> list[Parameter]:
    """Every parameter of the layer with this index, from 0."""
    has_more = architecture.family.norms_after
    after, last = (["self_attn_bda.norm.weight"], ["mlp_bda.norm.weight"]) if has_more else ([], [])
    norms = [_layer_entry(name, architecture) for name in (*after, "pre_mlp_layernorm.weight")]
    ends = [_layer_entry(name, architecture) for name in last]
    entries = _INPUT_NORM, *_mixer(architecture, number), *norms, *_mlp(architecture, number), *ends
    return [_in_layer(entry, number, architecture) for entry in entries]


def _mixer(architecture: Architecture, number: int) -> list[Parameter]:
    """The attention of a layer, or what it has instead."""
    family = architecture.family
    if number in architecture.delta_layers:
        return [_layer_entry(name, architecture) for name in _DELTA_NET]
    if (latent := architecture.latent) is not None:
        of_queries = () if latent.query_rank else ("q_down", "q_norm")
        absent = {f"self_attention.{name}.weight" for name in of_queries}
        return [_layer_entry(name, architecture) for name in _LATENT if name not in absent]
    names = [
        "linear_qkv.weight",
        *(["linear_qkv.bias"] if architecture.qkv_bias else []),
        *(["q_layernorm.weight", "k_layernorm.weight"] if family.qk_norm else []),
        *(["core_attention.softmax_offset"] if family.sinks else []),
        "linear_proj.weight",
        *(["linear_proj.bias"] if architecture.output_bias else []),
    ]
    return [_layer_entry(f"self_attention.{name}", architecture) for name in names]


def _mlp(architecture: Architecture, number: int) -> list[Parameter]:
    """The MLP of a layer, or its router and experts."""
    experts = architecture.experts
    if experts is None or number < architecture.num_dense_layers:
        return [_LAYER["mlp.linear_fc1.weight"], _LAYER["mlp.linear_fc2.weight"]]
    names = [] if experts.shared_width is None else _SHARED_EXPERT
    if not architecture.family.shared_expert_gate:
        names = [name for name in names if not name.endswith("gate_weight")]
    shared = [_layer_entry(name, architecture) for name in names]
    has_biases = architecture.family.biases
    router = [*_ROUTER_WITH_BIAS.values()] if has_biases else [_LAYER["mlp.router.weight"]]
    if architecture.family.scored_router:
        router.append(_LAYER["mlp.router.choice_bias"])
    each = [_expert(index, architecture).values() for index in range(experts.number)]
    if architecture.family.stacked_experts:  # all of a stack, then the next one
        each = zip(*each, strict=True)
    return [*shared, *router, *chain.from_iterable(each)]


def of_factors(entry: Parameter, architecture: Architecture) -> Parameter:
    """The entry with the matrices that have a pair of low-rank factors each: HF's
    tensors, but one matrix with the rows of gate and up where files interleave these."""
    if entry.layout != "expert_gate_up" or not architecture.family.stacked_experts:
        return entry
    return replace(entry, hf_names=(entry.hf_names[0].replace("gate_proj", "gate_up_proj"),))


def is_in_fp8(entry: Parameter, architecture: Architecture) -> bool:
    """Whether a layer multiplies this parameter in FP8. These are the matrices of experts and those
    that are cut over tensor ranks, except for decay and beta of a delta net."""
    first = entry.hf_names[0]
    is_shared = entry.is_cut and ".in_proj_b" not in first
    return (is_shared or entry.is_expert) and len(hf_shape(first, architecture)) == 2


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in the order of the forward pass."""
    entries = canonical_parameters(architecture)
    return {name: hf_shape(name, architecture) for entry in entries for name in entry.hf_names}


def hf_shape(name: str, architecture: Architecture) -> tuple[int, ...]:
    """The shape of a Hugging Face tensor of this architecture, or of a matrix of `of_factors`."""
    a = architecture
    if ".linear_attn." in name:
        return _delta_net_shape(name.rpartition(".linear_attn.")[2].removesuffix(".weight"), a)
    heads = a.num_attention_heads
    query, group, mixed = heads * a.head_dim, a.num_key_value_heads * a.head_dim, heads * a.head_dim
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    ffn = a.ffn_hidden_size if ".experts." in name else a.dense_width
    if name.rpartition(".mlp.")[2].startswith(("gate_proj", "up_proj", "down_proj")):
        ffn = a.mlp_width
    of_latent: dict[str, tuple[int, ...]] = {}
    if (latent := a.latent) is not None:
        mixed, queries = heads * latent.value_dim, latent.query_rank or a.hidden_size
        of_latent = {
            "q_a_proj": (queries, a.hidden_size),
            "q_a_layernorm": (queries,),
            "q_b_proj": (query, queries),
            "kv_a_proj_with_mqa": (latent.rank + latent.rotated_dim, a.hidden_size),
            "kv_a_layernorm": (latent.rank,),
            "kv_b_proj": (heads * (latent.plain_dim + latent.value_dim), latent.rank),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (a.vocab_size, a.hidden_size),
        "lm_head": (a.vocab_size, a.hidden_size),
        "q_proj": (query * (2 if a.family.gated_attention else 1), a.hidden_size),
        "k_proj": (group, a.hidden_size),
        "v_proj": (group, a.hidden_size),
        "o_proj": (a.hidden_size, mixed),
        "gate_proj": (ffn, a.hidden_size),
        "up_proj": (ffn, a.hidden_size),
        "gate_up_proj": (2 * ffn, a.hidden_size),
        "down_proj": (a.hidden_size, ffn),
        "gate": (a.experts.number if a.experts else 0, a.hidden_size),
        "router": (a.experts.number if a.experts else 0, a.hidden_size),
        "sinks": (a.num_attention_heads,),
        "e_score_correction_bias": (a.experts.number if a.experts else 0,),
        "shared_expert_gate": (1, a.hidden_size),
        "q_norm": (a.head_dim,),
        "k_norm": (a.head_dim,),
    }
    shape = (shapes | of_latent).get(kind, (a.hidden_size,))
    return shape[:1] if name.endswith(".bias") else shape


def _delta_net_shape(kind: str, architecture: Architecture) -> tuple[int, ...]:
    hidden, net = architecture.hidden_size, architecture.delta_net
    assert net is not None
    heads, values, channels = net.num_value_heads, net.values, net.channels
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv": (channels, hidden),
        "in_proj_z": (values, hidden),
        "in_proj_b": (heads, hidden),
        "in_proj_a": (heads, hidden),
        "in_proj_qkvz": (channels + values, hidden),
        "in_proj_ba": (2 * heads, hidden),
        "conv1d": (channels, 1, net.conv_width),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "norm": (net.value_dim,),
        "out_proj": (hidden, values),
    }
    return shapes[kind]
