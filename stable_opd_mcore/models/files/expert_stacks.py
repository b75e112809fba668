"""Stacks: tensors of a model's files, each of which holds matrices of all experts of a layer.

In gpt-oss's files `experts.gate_up_proj` is [E, H, 2 F], with columns of gate and up in turn, and
`experts.down_proj` is [E, F, H]. Their biases, `..._bias`, are [E, 2 F] and [E, H]. In
Qwen3.5-MoE's published files the two are [E, 2 F, H], gate before up, and [E, H, F]; transformers
may also write one tensor for each matrix of an expert, as models/tensors.py names them.

E experts, F width of one, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.tensors import hf_shapes

# A tensor of one expert: layer, expert, matrix, weight or bias
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


def are_stacked(architecture: Architecture, names: Iterable[str]) -> bool:
    """Whether files with tensors of these names hold the decoder's experts in stacks."""
    ends = (name for name in names if name.endswith(".experts.gate_up_proj"))
    return architecture.family.stacked_experts or any(name.startswith("model.") for name in ends)


@dataclass(frozen=True)
class Place:
    """Where a stack has the matrix or the bias of an expert."""

    stack: str
    expert: int
    rows: slice  # its rows in the expert's part of the stack, once that is transposed back
    matrices: int  # how many matrices of one expert the stack holds
    is_transposed: bool

    def of(self, stack: Any) -> Tensor:
        """The matrix or bias in `stack`: a view of a tensor, or read from a file's `get_slice`."""
        if self.is_transposed:
            return stack[self.expert].t()[self.rows]
        return stack[self.expert, self.rows]


def place(name: str, architecture: Architecture, is_stacked: bool) -> Place | None:
    """Where a stack holds a tensor of the model; None: the tensor is in no stack."""
    match = EXPERT.fullmatch(name)
    if match is None or not is_stacked:
        return None
    layer, expert, kind = match[1], int(match[2]), match[3]
    suffix = "_bias" if match[4] == "bias" else ""
    in_turn = architecture.family.stacked_experts
    if kind == "down_proj":
        return Place(f"{layer}.down_proj{suffix}", expert, slice(None), 1, in_turn)
    is_up, width = kind == "up_proj", architecture.ffn_hidden_size
    rows = slice(int(is_up), None, 2) if in_turn else slice(is_up * width, (1 + is_up) * width)
    return Place(f"{layer}.gate_up_proj{suffix}", expert, rows, 2, in_turn)


def file_shapes(architecture: Architecture, is_stacked: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the files, in the order of the forward pass."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, *columns) in hf_shapes(architecture).items():
        found = place(name, architecture, is_stacked)
        if found is None:
            shapes[name] = (rows, *columns)
            continue
        assert architecture.experts is not None
        each = [rows * found.matrices, *columns]
        each = reversed(each) if found.is_transposed else each
        shapes[found.stack] = (architecture.experts.number, *each)
    return shapes


def stacked(
    whole: Iterable[tuple[str, Tensor]],
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    is_stacked: bool,
) -> Iterator[tuple[str, Tensor]]:
    """`whole` with the stacks of `file_shapes` in place of experts' tensors, on the CPU."""
    stacks: dict[str, Tensor] = {}
    for name, tensor in whole:
        found = place(name, architecture, is_stacked)
        if found is None:
            yield from stacks.items()
            stacks = {}
            yield name, tensor
            continue
        if found.stack not in stacks:
            stacks[found.stack] = torch.empty(shapes[found.stack], dtype=tensor.dtype)
        found.of(stacks[found.stack]).copy_(tensor)
    assert not stacks, "the final norm comes after all layers"
