"""Self-attention in plain torch for Megatron's layers, packed or padded.

Shapes: s tokens of a sequence, b sequences, T packed tokens, P slots of their padded rectangles,
A query heads and G key-value groups of this tensor rank, D head size.

One class replaces the forward of Megatron's SelfAttention; its projections, norms and parallelism
stay. Rotary positions come per token and sequences of similar length are attended to together, so
nothing loops over the sequences of a micro-batch. Not decoding (rollout/ has its own cached
attention), and not used where Transformer Engine is available.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_opd_mcore.parallel import megatron_cpu

megatron_cpu.install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.attention import SelfAttention  # noqa: E402

_BUCKET_RATIO = 0.75  # a sequence joins a bucket when at least this share of the bucket's longest


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for sequence parallelism, which Megatron's own refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore


class RotaryByPosition(torch.nn.Module):
    """Cosines and sines looked up per token, in place of Megatron's RotaryEmbedding.

    `positions` is set by the model before each forward; the table grows as needed.
    """

    def __init__(self, frequencies: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._frequencies = frequencies  # fp32 [D/2]; not a buffer: it is no weight
        self._dtype = dtype
        self._table = torch.empty(0, frequencies.numel() * 2, dtype=dtype)
        self.positions: Tensor | None = None  # [b, s]

    def get_rotary_seq_len(self, *unused: Any, **also_unused: Any) -> int:
        return 0  # Megatron asks for a length; positions say all

    def forward(self, unused_length: int, **unused: Any) -> Tensor:
        """[s, b, 1, D]: cosines in the first half, sines in the second."""
        assert self.positions is not None
        longest = int(self.positions.max()) + 1
        if longest > self._table.shape[0] or self._table.device != self.positions.device:
            self._grow(longest)
        return self._table[self.positions.transpose(0, 1)].unsqueeze(2)

    def _grow(self, length: int) -> None:
        length = 1 << (length - 1).bit_length()
        assert self.positions is not None
        device = self.positions.device
        angles = torch.outer(
            torch.arange(length, dtype=torch.float32, device=device), self._frequencies.to(device)
        )
        self._table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self._dtype)


def rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate [s, b, heads, D] by [s, b, 1, D]; halves are paired, as in transformers."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True)
class Buckets:
    """T packed tokens laid out as a few rectangles [sequences, longest], attended to at once.

    Every packed token stands in exactly one slot. Padding stands right of its sequence, where
    causal attention never looks at it; it repeats the sequence's first token, and what it yields is
    dropped.
    """

    shapes: tuple[tuple[int, int], ...]  # (sequences, longest) per rectangle
    token_of_slot_P: Tensor | None  # int64; None: one rectangle that is the packed order itself
    slot_of_token_T: Tensor | None  # int64

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Buckets:
        """Group sequences of similar length, longest first."""
        lengths_of = [(length, i) for i, length in enumerate(lengths) if length]
        if len({length for length, _ in lengths_of}) == 1:
            return cls(((len(lengths_of), lengths_of[0][0]),), None, None)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        shapes: list[tuple[int, int]] = []
        token_of_slot: list[Tensor] = []
        slot_of_token = torch.empty(starts[-1], dtype=torch.int64)
        lengths_of.sort(key=lambda item: (-item[0], item[1]))
        slot = begin = 0
        while begin < len(lengths_of):
            longest = lengths_of[begin][0]
            end = begin
            while end < len(lengths_of) and lengths_of[end][0] >= _BUCKET_RATIO * longest:
                length, i = lengths_of[end]
                tokens = torch.arange(starts[i], starts[i] + length)
                token_of_slot.append(F.pad(tokens, (0, longest - length), value=starts[i]))
                slot_of_token[tokens] = torch.arange(slot, slot + length)
                slot += longest
                end += 1
            shapes.append((end - begin, longest))
            begin = end
        return cls(tuple(shapes), torch.cat(token_of_slot).to(device), slot_of_token.to(device))


_NO_BUCKETS = Buckets((), None, None)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with their rectangles."""

    buckets: Buckets = _NO_BUCKETS


class TorchSelfAttention(SelfAttention):
    """Megatron's self-attention with the attention itself by scaled_dot_product_attention."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences | None = None,
        inference_context: None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [s, b, H], or of its sequence-parallel slice.

        With `packed_seq_params` b is 1 and each sequence attends to itself, causally. Without, it
        is plain causal attention over s, or what `attention_mask` leaves: [b, 1, s, s], bool, True
        hides (Megatron's convention).
        """
        assert inference_context is None, "cached decoding brings its own attention"
        query, key, value = cast(
            tuple[Tensor, Tensor, Tensor], self.get_query_key_value_tensors(hidden_states, None)
        )
        heads = (rotate(query, rotary_pos_emb), rotate(key, rotary_pos_emb), value)
        if packed_seq_params is not None:
            attention = partial(_packed, buckets=packed_seq_params.buckets)
        else:
            attention = partial(_padded, mask=attention_mask)
        if self.checkpoint_core_attention and self.training:
            output = tensor_parallel.checkpoint(attention, False, *heads)
        else:
            output = attention(*heads)
        return self.linear_proj(output)


def _padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of [s, b, heads, D], as [s, b, A D]."""
    query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else ~mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.permute(2, 0, 1, 3).flatten(2)


def _packed(query: Tensor, key: Tensor, value: Tensor, buckets: Buckets) -> Tensor:
    """Causal attention within each sequence of [T, 1, heads, D], as [T, 1, A D]."""
    parts = []
    begin = 0
    query, key, value = (_to_slots(x.squeeze(1), buckets) for x in (query, key, value))
    for sequences, longest in buckets.shapes:
        end = begin + sequences * longest
        q, k, v = (
            x[begin:end].unflatten(0, (sequences, longest)).transpose(1, 2)
            for x in (query, key, value)
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        begin = end
    output_P = torch.cat(parts) if len(parts) > 1 else parts[0]
    if buckets.slot_of_token_T is not None:
        output_P = output_P.index_select(0, buckets.slot_of_token_T)
    return output_P.unsqueeze(1)


def _to_slots(rows_T: Tensor, buckets: Buckets) -> Tensor:
    if buckets.token_of_slot_P is None:
        return rows_T
    return rows_T.index_select(0, buckets.token_of_slot_P)
