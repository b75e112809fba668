"""How a parameter is cut over the tensor ranks, and joined from its parts.

Which Hugging Face tensors make up a parameter, and in which layout, is in tensors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.tensors import Grouped, Layout, Parameter, hf_shape

_UNCUT = ("whole", "replicated", "expert_gate_up", "expert_down")


def own_parts(
    entry: Parameter, architecture: Architecture, rank: int, size: int
) -> list[tuple[str, tuple[slice, ...]]]:
    """Name and slices of the parts of HF tensors that tensor rank `rank` of `size` holds.

    One part of each of the `pieces`. Those of a tensor in layout "vocab" may differ in size.
    """
    parts = []
    for name, start, rows in pieces(entry, architecture):
        if entry.layout in _UNCUT:
            parts.append((name, (slice(None),)))
        elif entry.layout == "columns":
            inputs = hf_shape(name, architecture)[1]
            parts.append((name, (slice(None), _share(0, inputs, rank, size))))
        else:
            parts.append((name, (_share(start, rows, rank, size),)))
    return parts


def pieces(entry: Parameter, architecture: Architecture) -> list[tuple[str, int, int]]:
    """HF name, first row and number of rows of each piece of the entry's tensors that is cut over
    the ranks by itself: a whole tensor, or one part of several that it joins."""
    found = []
    grouped = iter(_grouped_rows(entry.layout, architecture))
    for name in entry.hf_names:
        start, end = 0, hf_shape(name, architecture)[0]
        while start < end:
            rows = next(grouped, end)
            found.append((name, start, rows))
            start += rows
    return found


def _share(start: int, length: int, rank: int, size: int) -> slice:
    each = -(-length // size)
    return slice(start + min(rank * each, length), start + min((rank + 1) * each, length))


def _is_grouped(layout: Layout) -> bool:
    return layout in get_args(Grouped)


def _num_groups(layout: Layout, architecture: Architecture) -> int:
    if layout in ("qkv", "gated_qkv"):
        return architecture.num_key_value_heads
    assert architecture.delta_net is not None
    return architecture.delta_net.num_key_heads


def _grouped_rows(layout: Layout, architecture: Architecture) -> list[int]:
    """Rows, over all tensor ranks, of each piece whose groups a parameter interleaves; empty for
    other layouts."""
    a, net = architecture, architecture.delta_net
    if layout in ("qkv", "gated_qkv"):
        group = a.num_key_value_heads * a.head_dim
        query = a.num_attention_heads * a.head_dim * (2 if layout == "gated_qkv" else 1)
        return [query, group, group]
    if not _is_grouped(layout):
        return []
    assert net is not None
    if layout == "delta_ba":
        return [net.num_value_heads] * 2
    return [net.keys, net.keys, net.values] + ([net.values] if layout == "delta_qkvz" else [])


def join_parts(
    parts: Sequence[Tensor], layout: Layout, architecture: Architecture, size: int
) -> Tensor:
    """A tensor rank's shard, from its `own_parts`; `size` tensor ranks."""
    if _is_grouped(layout) or layout in ("gate_up", "expert_gate_up"):
        return join_rows(parts, layout, architecture, size)
    (part,) = parts
    if layout != "vocab":
        return part
    missing = -(-architecture.vocab_size // size) - part.shape[0]
    return torch.cat([part, part.new_zeros(missing, part.shape[1])]) if missing else part


def join_rows(
    parts: Sequence[Tensor], layout: Layout, architecture: Architecture, size: int, dim: int = 0
) -> Tensor:
    """A tensor rank's rows in a parameter's order, from those of its `own_parts`, in dimension
    `dim`. The last dimension of a linear layer's output has them too."""
    if not _is_grouped(layout):
        return _join(parts, dim)
    dim %= parts[0].dim()
    groups = _num_groups(layout, architecture) // size
    rows = [part.unflatten(dim, (groups, -1)) for part in parts]
    if layout == "gated_qkv":
        rows[0] = _swapped(rows[0], architecture, dim + 1, from_heads=True)
    return torch.cat(rows, dim=dim + 1).flatten(dim, dim + 1)


def _swapped(rows: Tensor, architecture: Architecture, dim: int, *, from_heads: bool) -> Tensor:
    """Reorder the rows of a group's queries and gates, which are in dimension `dim`. `from_heads`:
    from a query and a gate for each head to all queries before all gates; else back."""
    heads = architecture.num_attention_heads // architecture.num_key_value_heads
    order = (heads, 2) if from_heads else (2, heads)
    return rows.unflatten(dim, (*order, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def unshard(
    shards: Sequence[Tensor], entry: Parameter, architecture: Architecture
) -> tuple[Tensor, ...]:
    """The full HF tensors of all tensor ranks' shards; one shard gives views where possible."""
    layout = entry.layout
    if _is_grouped(layout):
        return _ungrouped(_join(shards), entry, architecture)
    if layout == "expert_gate_up":
        return tuple(shards[0].chunk(2))
    if layout == "gate_up":
        halves = [piece.chunk(2) for piece in shards]
        return tuple(_join(pieces) for pieces in zip(*halves, strict=True))
    if layout in _UNCUT:
        return (shards[0],)
    if layout == "columns":
        return (_join(shards, dim=1),)
    joined = _join(shards)
    return (joined[: architecture.vocab_size] if layout == "vocab" else joined,)


def _ungrouped(weight: Tensor, entry: Parameter, architecture: Architecture) -> tuple[Tensor, ...]:
    """The HF tensors of a whole parameter whose pieces are interleaved by group."""
    groups = _num_groups(entry.layout, architecture)
    rows = [number // groups for number in _grouped_rows(entry.layout, architecture)]
    parts = list(weight.reshape(groups, -1, *weight.shape[1:]).split(rows, dim=1))
    if entry.layout == "gated_qkv":
        parts[0] = _swapped(parts[0], architecture, 1, from_heads=False)
    whole = [part.flatten(0, 1) for part in parts]
    tensors = []
    for name in entry.hf_names:
        taken = [whole.pop(0)]
        while sum(map(len, taken)) < hf_shape(name, architecture)[0]:
            taken.append(whole.pop(0))
        tensors.append(_join(taken))
    return tuple(tensors)


def _join(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate; return a single piece itself, which `torch.cat` would copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=dim)
