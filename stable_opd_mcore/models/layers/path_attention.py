"""Transformer Engine's attention over sequences that share tokens (data/shared_prefixes.py).

Its kernels take queries and keys of different lengths, aligned at their ends. So each sequence's
queries are of its own tokens only, and its keys and values are copied together from its whole path.
To Megatron's rotary embedding all tokens are one sequence, whose rotations are looked up by
position. In plain torch: attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.records import MicroBatch

MASK = "padding_causal_bottom_right"  # Transformer Engine's name; Megatron's enum lacks it


@dataclass
class PathSequences(PackedSeqParams):
    """All tokens as one sequence, and what attention takes instead."""

    attended: PackedSeqParams | None = None
    key_places_K: Tensor | None = None  # see MicroBatch
    positions_T: Tensor | None = None

    @classmethod
    def of(cls, microbatch: MicroBatch, **described: Any) -> PathSequences:
        """described: the fields of Megatron's PackedSeqParams for the tokens of their own."""
        ends = microbatch.cu_seqlens
        one = ends[:: len(ends) - 1].contiguous()  # 0 and T
        for_rotation = {**described, "cu_seqlens_q": one, "cu_seqlens_kv": one}
        for_attention = {**described, "cu_seqlens_kv": microbatch.cu_seqlens_keys}
        return cls(
            **for_rotation,
            attended=PackedSeqParams(**for_attention),
            key_places_K=microbatch.key_places_K,
            positions_T=microbatch.positions_T,
        )

    def rotations(self, by_position: Tensor) -> Tensor:
        """Those of each token, [..., T, 1, 1, D], from those of each position."""
        assert self.positions_T is not None
        return by_position.index_select(-4, self.positions_T)


def follow_paths(attention: Module) -> None:
    """Let Transformer Engine's attention take `PathSequences` too."""
    attention.register_forward_pre_hook(_along_paths, with_kwargs=True)
    attention.register_forward_hook(_as_before, with_kwargs=True, always_call=True)


def _along_paths(
    attention: Module, heads: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    packed = options.get("packed_seq_params")
    if not isinstance(packed, PathSequences):
        return None
    _set_type(attention, "cross")  # of "self", unfused attention takes queries' lengths for keys'
    query, key, value, *rest = heads
    key, value = (each.index_select(0, packed.key_places_K) for each in (key, value))
    changed = {"packed_seq_params": packed.attended, "attn_mask_type": SimpleNamespace(name=MASK)}
    return (query, key, value, *rest), options | changed


def _as_before(attention: Module, _heads: object, options: dict[str, Any], _output: object) -> None:
    if getattr(options.get("attn_mask_type"), "name", None) == MASK:
        _set_type(attention, "self")


def _set_type(attention: Module, name: str) -> None:
    """What Transformer Engine calls the type, of the layer and of each of its kernels."""
    for each in (attention, *attention.children()):
        if hasattr(each, "attention_type"):
            each.attention_type = name  # pyright: ignore
