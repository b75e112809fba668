"""Self-attention in plain torch for Megatron's layers, over packed sequences.

Shapes: T packed tokens, P cells of their padded rectangles, A query heads and G key-value groups of
this tensor rank, D head size, H hidden size.

One class replaces the forward of Megatron's SelfAttention. Sequences of similar length are attended
to together, so nothing loops over the sequences of a micro-batch. Under context parallelism the
keys of all ranks are gathered. Not for decoding: rollout/ has its own cached attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from stable_opd_mcore.models.layers.attention_sinks import (
    attend_with_sinks,
    causal_bias,
    sinks_of,
    window_of,
)
from stable_opd_mcore.models.layers.rotary import rotate
from stable_opd_mcore.parallel.context import token_indices

_BUCKET_RATIO = 0.75  # the shortest sequence of a bucket, as a share of the longest, at least


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm marked for sequence parallelism, which Megatron's torch norm refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore


class NormedSum(torch.nn.Module):
    """What a layer adds to its input, after a norm of it. It replaces Megatron's sum."""

    def __init__(self, config: Any, norm: Any) -> None:
        super().__init__()
        self.norm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, *_: bool) -> Callable[..., Tensor]:
        """Megatron asks for the sum first, and calls it with output, bias and input."""
        return self._sum

    def _sum(
        self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _dropout: float
    ) -> Tensor:
        output, bias = output_with_bias
        return residual + self.norm(output if bias is None else output + bias)


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, factor, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Buckets:
    """T packed tokens laid out as a few rectangles [sequences, longest], each attended to at once.

    Every packed token has exactly one cell. The cells after a sequence's end repeat its first
    token: causal attention ignores them, and their outputs are dropped.
    """

    shapes: tuple[tuple[int, int], ...]  # (sequences, longest) per rectangle
    token_of_cell_P: Tensor | None  # int64; None: one rectangle in the packed order
    cell_of_token_T: Tensor | None  # int64

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Buckets:
        """Group sequences of similar length, longest first."""
        if len({length for length in lengths if length}) == 1:
            longest = max(lengths)
            return cls(((sum(lengths) // longest, longest),), None, None)
        return cls.of_groups(_similar([(length,) for length in lengths]), lengths, device)

    @classmethod
    def of_groups(
        cls, groups: list[list[int]], lengths: list[int], device: torch.device
    ) -> Buckets:
        """A rectangle for the sequences of each group, the places of their lengths."""
        starts = [0, *accumulate(lengths)]
        shapes: list[tuple[int, int]] = []
        token_of_cell: list[Tensor] = []
        cell_of_token = torch.empty(starts[-1], dtype=torch.int64)
        cell = 0
        for group in groups:
            longest = max(lengths[i] for i in group)
            for i in group:
                tokens = torch.arange(starts[i], starts[i] + lengths[i])
                token_of_cell.append(F.pad(tokens, (0, longest - lengths[i]), value=starts[i]))
                cell_of_token[tokens] = torch.arange(cell, cell + lengths[i])
                cell += longest
            shapes.append((len(group), longest))
        return cls(tuple(shapes), torch.cat(token_of_cell).to(device), cell_of_token.to(device))


def _similar(sizes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """The places of sequences, those of similar sizes together, the largest first."""
    groups: list[list[int]] = []
    least: tuple[float, ...] = ()
    for i in sorted(range(len(sizes)), key=lambda i: (*(-size for size in sizes[i]), i)):
        if not sizes[i][0]:
            continue
        if groups and all(size >= few for size, few in zip(sizes[i], least, strict=True)):
            groups[-1].append(i)
        else:
            groups.append([i])
            least = tuple(_BUCKET_RATIO * size for size in sizes[i])
    return groups


@dataclass(frozen=True)
class OtherKeys:
    """The whole sequences that queries attend to, where packing has only a part of their tokens: a
    context-parallel rank's slice, or what a sequence does not share with others.

    Their rectangles match those of the queries one by one.
    """

    group: dist.ProcessGroup | None  # whose keys are gathered, rank after rank
    buckets: Buckets
    positions: tuple[Tensor, ...]  # int64 [sequences, longest queries, 1] in their sequences
    masks: tuple[Tensor, ...]  # bool [sequences, 1, longest queries, longest]: True is attended to

    @classmethod
    def gathered(
        cls, cu_seqlens: Tensor, queries: Buckets, positions_T: Tensor, group: dist.ProcessGroup
    ) -> OtherKeys:
        """Build it from the rectangles of this rank's slices, and their tokens' positions."""
        ranks = range(group.size())
        order = torch.cat([token_indices(cu_seqlens, rank, group.size()) for rank in ranks])
        gathered_T = torch.empty_like(order)
        gathered_T[order] = torch.arange(len(order), device=order.device)
        whole = Buckets.of(cu_seqlens.diff().tolist(), order.device)
        return cls._of(group, whole, gathered_T, queries, positions_T)

    @classmethod
    def shared(
        cls, cu_seqlens: Tensor, positions_T: Tensor, key_places_K: Tensor, cu_seqlens_keys: Tensor
    ) -> tuple[Buckets, OtherKeys]:
        """The rectangles of tokens of their own, and of what they attend to; see MicroBatch."""
        own, whole = cu_seqlens.diff().tolist(), cu_seqlens_keys.diff().tolist()
        groups = _similar([*zip(own, whole, strict=True)])
        queries = Buckets.of_groups(groups, own, key_places_K.device)
        keys = Buckets.of_groups(groups, whole, key_places_K.device)
        return queries, cls._of(None, keys, key_places_K, queries, positions_T)

    @classmethod
    def _of(
        cls,
        group: dist.ProcessGroup | None,
        whole: Buckets,
        places: Tensor,
        queries: Buckets,
        positions_T: Tensor,
    ) -> OtherKeys:
        """`places`: of the tokens of `whole` among the keys."""
        positions = tuple(part.unsqueeze(-1) for part in to_rectangles(positions_T, queries))
        masks = tuple(
            part[:, None] >= torch.arange(longest, device=places.device)
            for part, (_, longest) in zip(positions, whole.shapes, strict=True)
        )
        return cls(group, Buckets(whole.shapes, _to_cells(places, whole), None), positions, masks)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' keys and values [T, 1, G, ·]; the backward pass sums the ranks' gradients."""
        if self.group is None:
            return key, value
        both = gather_from_sequence_parallel_region(
            torch.cat((key, value), dim=-1), group=self.group
        )
        key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        return key, value


_NO_BUCKETS = Buckets((), None, None)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, and their rectangles."""

    buckets: Buckets = _NO_BUCKETS
    keys: OtherKeys | None = None  # None: the packed tokens are whole sequences

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor,
        positions_T: Tensor,
        group: dist.ProcessGroup,
        key_places_K: Tensor | None = None,
        cu_seqlens_keys: Tensor | None = None,
        **described: Any,
    ) -> PackedSequences:
        """Add rectangles to `described`, the fields of Megatron's PackedSeqParams.

        Args:
            group: its ranks hold the slices of the sequences; a group of one holds them whole.
            key_places_K, cu_seqlens_keys: those of the MicroBatch.
        """
        if key_places_K is not None and cu_seqlens_keys is not None:
            assert group.size() == 1, "config refuses context parallelism with shared prefixes"
            buckets, keys = OtherKeys.shared(cu_seqlens, positions_T, key_places_K, cu_seqlens_keys)
            return cls(**described, buckets=buckets, keys=keys)
        lengths = [length // group.size() for length in cu_seqlens.diff().tolist()]
        buckets, keys = Buckets.of(lengths, positions_T.device), None
        if group.size() > 1:
            keys = OtherKeys.gathered(cu_seqlens, buckets, positions_T, group)
        return cls(**described, buckets=buckets, keys=keys)


class StackedRotarySelfAttention(SelfAttention):
    """Megatron's self-attention with the rotary positions of its kind of layer among several."""

    rotary: int = 0  # the place of its own in Architecture.rotaries()

    def forward(self, *inputs: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:  # pyright: ignore
        return super().forward(*inputs, rotary_pos_emb=rotary_pos_emb[self.rotary], **options)


class TorchSelfAttention(SelfAttention):
    """Megatron's self-attention, computed by torch's scaled_dot_product_attention."""

    rotary: int = 0  # the place of its rotary positions in Architecture.rotaries()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Each sequence's causal attention to itself, [T, 1, H] or its sequence-parallel slice."""
        assert attention_mask is None, "a mask would hide nothing else in packed sequences"
        is_gated: bool = self.config.attention_output_gate
        query, key, value, *gates = cast(
            tuple[Tensor, ...],
            self.get_query_key_value_tensors(hidden_states, None, output_gate=is_gated),
        )
        rotation = rotary_pos_emb[self.rotary]
        heads = (rotate(query, rotation), rotate(key, rotation), value)
        buckets, keys = packed_seq_params.buckets, packed_seq_params.keys
        output = packed_attention(
            *heads,
            buckets=buckets,
            keys=keys,
            scale=self.config.softmax_scale,
            sinks=sinks_of(self),
            window=window_of(self),
        )
        for gate in gates:
            output = output * gate.flatten(2).sigmoid()
        return self.linear_proj(output)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: Buckets,
    keys: OtherKeys | None = None,
    scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence of [T, 1, heads, D], as [T, 1, A D]. Values may have
    another size than queries and keys.

    Args:
        sinks, window: the layer's (attention_sinks.py).
    """
    parts = []
    whole = buckets
    positions = masks = (None,) * len(buckets.shapes)
    if keys is not None:
        whole, positions, masks = keys.buckets, keys.positions, keys.masks
        key, value = keys.gather(key, value)
    heads = (_rectangles(query, buckets), _rectangles(key, whole), _rectangles(value, whole))
    for q, k, v, at, mask in zip(*heads, positions, masks, strict=True):
        if sinks is not None or window is not None:
            bias = causal_bias(k.shape[2], window, at, like=q)
            attended = attend_with_sinks(q, k, v, sinks, bias=bias, scale=scale)
        else:
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        parts.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    return from_rectangles(parts, buckets).unsqueeze(1)


def _rectangles(rows_T1: Tensor, buckets: Buckets) -> list[Tensor]:
    """[T, 1, heads, D] as one [sequences, heads, longest, D] per rectangle."""
    return [part.transpose(1, 2) for part in to_rectangles(rows_T1.squeeze(1), buckets)]


def to_rectangles(rows_T: Tensor, buckets: Buckets) -> list[Tensor]:
    """[T, ...] as one [sequences, longest, ...] per rectangle."""
    parts = _to_cells(rows_T, buckets).split([n * longest for n, longest in buckets.shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, buckets.shapes, strict=True)]


def from_rectangles(parts: list[Tensor], buckets: Buckets) -> Tensor:
    """[T, ...] of the cells of all rectangles, [sequences * longest, ...] each."""
    rows_P = torch.cat(parts) if len(parts) > 1 else parts[0]
    if buckets.cell_of_token_T is None:
        return rows_P
    return rows_P.index_select(0, buckets.cell_of_token_T)


def _to_cells(rows_T: Tensor, buckets: Buckets) -> Tensor:
    if buckets.token_of_cell_P is None:
        return rows_T
    return rows_T.index_select(0, buckets.token_of_cell_P)
