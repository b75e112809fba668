"""Experts in the files of a model that hold those of a layer in one tensor.

In gpt-oss's files `experts.gate_up_proj` is [E, H, 2 F] with columns of gate and up in turn,
`experts.down_proj` [E, F, H], and each has a `..._bias` without the H or F that is multiplied. In
the trainer every expert's matrices have names of their own (tensors.py).

E experts, F width of one, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.models.tensors import hf_shapes

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


@dataclass(frozen=True)
class Place:
    """Where a stack has the matrix or the bias of an expert."""

    stack: str
    expert: int
    rows: slice  # of the expert's matrix, transposed

    def of(self, expert: Tensor) -> Tensor:
        """A view of it in the expert's part of the stack."""
        return expert.t()[self.rows]


def place(name: str, architecture: Architecture) -> Place | None:
    """Where the files have a tensor of the model; None: by itself."""
    match = _EXPERT.fullmatch(name)
    if match is None or not architecture.family.stacked_experts:
        return None
    layer, expert, kind = match[1], int(match[2]), match[3]
    suffix = "_bias" if match[4] == "bias" else ""
    if kind == "down":
        return Place(f"{layer}.down_proj{suffix}", expert, slice(None))
    rows = slice(0 if kind == "gate" else 1, None, 2)
    return Place(f"{layer}.gate_up_proj{suffix}", expert, rows)


def file_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the files, in the order of the forward pass."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, *columns) in hf_shapes(architecture).items():
        found = place(name, architecture)
        if found is None:
            shapes[name] = (rows, *columns)
            continue
        assert architecture.experts is not None
        shapes[found.stack] = (architecture.experts.number, *columns, rows * (found.rows.step or 1))
    return shapes


def stacked(
    whole: Iterable[tuple[str, Tensor]], architecture: Architecture, shapes: Mapping[str, tuple]
) -> Iterator[tuple[str, Tensor]]:
    """`whole` with the stacks of `file_shapes` in place of experts' tensors, on the CPU."""
    stacks: dict[str, Tensor] = {}
    for name, tensor in whole:
        found = place(name, architecture)
        if found is None:
            yield from stacks.items()
            stacks = {}
            yield name, tensor
            continue
        if found.stack not in stacks:
            stacks[found.stack] = torch.empty(shapes[found.stack], dtype=tensor.dtype)
        found.of(stacks[found.stack][found.expert]).copy_(tensor)
    assert not stacks, "the final norm comes after all layers"
