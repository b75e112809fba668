"""The table of Hugging Face's tensors and Megatron's parameters, read in both directions.

One to three HF tensors make up a parameter in one of seven layouts, which is then cut over the
tensor ranks. An expert is not cut: one expert-parallel rank holds it whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stable_opd_mcore.models.families import Architecture

# whole: the same on every rank
# columns: cut along dimension 1
# qkv: heads interleaved by key-value group, then cut
# gate_up: each half cut, then joined
# vocab: rows padded to a multiple of the ranks, then cut
# expert_gate_up, expert_down: one expert's, on the expert-parallel rank that holds it
Layout = Literal["whole", "columns", "qkv", "gate_up", "vocab", "expert_gate_up", "expert_down"]


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter before it is cut: its HF tensors and its layout."""

    hf_names: tuple[str, ...]
    layout: Layout

    @property
    def is_expert(self) -> bool:
        return self.layout.startswith("expert")


_TOP: dict[str, Parameter] = {
    "embedding.word_embeddings.weight": Parameter(("model.embed_tokens.weight",), "vocab"),
    "decoder.final_layernorm.weight": Parameter(("model.norm.weight",), "whole"),
    "output_layer.weight": Parameter(("lm_head.weight",), "vocab"),
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
    "self_attention.linear_proj.weight": Parameter(("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": Parameter(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": Parameter(("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": Parameter(("mlp.gate.weight",), "whole"),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAMES = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<index>\d+)\.linear_fc(?P<matrix>[12])\.weight"),
    # Transformer Engine's layer of several experts
    re.compile(r"mlp\.experts\.linear_fc(?P<matrix>[12])\.weight(?P<index>\d+)"),
)


def _expert(index: int) -> tuple[Parameter, Parameter]:
    """The two parameters of an expert of a layer."""
    gate, up, down = (f"mlp.experts.{index}.{x}_proj.weight" for x in ("gate", "up", "down"))
    return Parameter((gate, up), "expert_gate_up"), Parameter((down,), "expert_down")


def _layer_entry(name: str, first_expert: int) -> Parameter:
    for pattern in _EXPERT_NAMES:
        if match := pattern.fullmatch(name):
            return _expert(first_expert + int(match["index"]))[int(match["matrix"]) - 1]
    return _LAYER[name]


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
        return _TOP[name]
    return _in_layer(_layer_entry(match[2], first_expert), layer_numbers[int(match[1])])


def _in_layer(entry: Parameter, number: int) -> Parameter:
    """The entry of a layer's table with the full names of its HF tensors."""
    names = tuple(f"model.layers.{number}.{name}" for name in entry.hf_names)
    return Parameter(names, entry.layout)


def canonical_parameters(architecture: Architecture) -> list[Parameter]:
    """Every parameter of the whole model, in the order of the forward pass."""
    family = architecture.family
    layer = [
        _INPUT_NORM,
        _LAYER["self_attention.linear_qkv.weight"],
        *([_LAYER["self_attention.linear_qkv.bias"]] if family.qkv_bias else []),
        *([_LAYER[f"self_attention.{x}_layernorm.weight"] for x in "qk"] if family.qk_norm else []),
        _LAYER["self_attention.linear_proj.weight"],
        _MLP_NORM,
        *_mlp(architecture),
    ]
    numbers = range(architecture.num_layers)
    layers = [_in_layer(entry, number) for number in numbers for entry in layer]
    embedding, norm, head = _TOP.values()
    return [embedding, *layers, norm, *([] if architecture.tied else [head])]


def _mlp(architecture: Architecture) -> list[Parameter]:
    experts = architecture.experts
    if experts is None:
        return [_LAYER["mlp.linear_fc1.weight"], _LAYER["mlp.linear_fc2.weight"]]
    each = [parameter for index in range(experts.number) for parameter in _expert(index)]
    return [_LAYER["mlp.router.weight"], *each]


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in the order of the forward pass."""
    entries = canonical_parameters(architecture)
    return {name: hf_shape(name, architecture) for entry in entries for name in entry.hf_names}


def hf_shape(name: str, architecture: Architecture) -> tuple[int, ...]:
    """The shape of a Hugging Face tensor of this architecture."""
    a = architecture
    query, group = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (a.vocab_size, a.hidden_size),
        "lm_head": (a.vocab_size, a.hidden_size),
        "q_proj": (query, a.hidden_size),
        "k_proj": (group, a.hidden_size),
        "v_proj": (group, a.hidden_size),
        "o_proj": (a.hidden_size, query),
        "gate_proj": (a.ffn_hidden_size, a.hidden_size),
        "up_proj": (a.ffn_hidden_size, a.hidden_size),
        "down_proj": (a.hidden_size, a.ffn_hidden_size),
        "gate": (a.experts.number if a.experts else 0, a.hidden_size),
        "q_norm": (a.head_dim,),
        "k_norm": (a.head_dim,),
    }
    shape = shapes.get(kind, (a.hidden_size,))
    return shape[:1] if name.endswith(".bias") else shape


_UNCUT = ("whole", "expert_gate_up", "expert_down")


def own_part(shape: Sequence[int], layout: Layout, rank: int, size: int) -> tuple[slice, ...]:
    """The part of an HF tensor that tensor rank `rank` of `size` holds; "vocab" may be uneven."""
    if layout in _UNCUT:
        return (slice(None),)
    cut = 1 if layout == "columns" else 0
    each = -(-shape[cut] // size)
    own = slice(min(rank * each, shape[cut]), min((rank + 1) * each, shape[cut]))
    return (slice(None), own) if cut else (own,)


def join_parts(
    parts: Sequence[Tensor], layout: Layout, architecture: Architecture, size: int
) -> Tensor:
    """A tensor rank's shard, from its `own_part` of each HF tensor; `size` tensor ranks."""
    if layout == "qkv":
        groups = architecture.num_key_value_heads // size
        rows = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(rows, dim=1).flatten(0, 1)
    if layout in ("gate_up", "expert_gate_up"):
        return torch.cat(list(parts))
    (part,) = parts
    if layout != "vocab":
        return part
    missing = -(-architecture.vocab_size // size) - part.shape[0]
    return torch.cat([part, part.new_zeros(missing, part.shape[1])]) if missing else part


def unshard(
    shards: Sequence[Tensor], layout: Layout, architecture: Architecture
) -> tuple[Tensor, ...]:
    """The full HF tensors of all tensor ranks' shards; one shard gives views where possible."""
    if layout == "qkv":
        size, per_group = architecture.head_dim, architecture.num_attention_heads
        per_group = per_group // architecture.num_key_value_heads
        groups = _join(shards)
        groups = groups.reshape(architecture.num_key_value_heads, -1, *groups.shape[1:])
        parts = groups.split([per_group * size, size, size], dim=1)
        return tuple(part.flatten(0, 1) for part in parts)
    if layout == "expert_gate_up":
        return tuple(shards[0].chunk(2))
    if layout == "gate_up":
        halves = [piece.chunk(2) for piece in shards]
        return tuple(_join(pieces) for pieces in zip(*halves, strict=True))
    if layout in _UNCUT:
        return (shards[0],)
    if layout == "columns":
        return (_join(shards, dim=1),)
    return (_join(shards)[: architecture.vocab_size],)


def _join(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate; return a single piece itself, which `torch.cat` would copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=dim)
