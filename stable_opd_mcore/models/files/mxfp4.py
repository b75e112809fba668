"""Experts' matrices in MXFP4, as OpenAI publishes gpt-oss: read as bf16, never written.

A block of 32 numbers of a row shares a power of two. `..._blocks` [E, O, I / 32, 16] has two 4-bit
numbers in a byte, the first in its low half; `..._scales` [E, O, I / 32] has the exponents plus
127. Every value is exact in bf16, except with exponents near the ends of its range.

E experts, O outputs and I inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

PARTS = ("_blocks", "_scales")  # what is added to a stack's name
DTYPE = "U8"  # of both, by safetensors' name
_BLOCK = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # without the sign, a number's highest bit
_EXPONENT_OF_ONE = 127


def parts_of(stack: str) -> tuple[str, str]:
    """The names of the two tensors that hold a stack of experts (expert_stacks.py) in MXFP4."""
    blocks, scales = (stack + part for part in PARTS)
    return blocks, scales


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], names: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """`shapes`, with those of blocks and scales for each stack that `names` has in MXFP4."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        blocks, scales = parts_of(name)
        if blocks not in names:
            found[name] = shape
            continue
        experts, inputs, outputs = shape
        found[scales] = (experts, outputs, inputs // _BLOCK)
        found[blocks] = (*found[scales], _BLOCK // 2)
    return found


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """bf16 [..., I], from blocks [..., I / 32, 16] and scales [..., I / 32], both uint8."""
    values = torch.tensor([sign * value for sign in (1, -1) for value in _VALUES]).bfloat16()
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1)
    exponents = scales.int() - _EXPONENT_OF_ONE
    return torch.ldexp(numbers.flatten(-2), exponents.unsqueeze(-1)).bfloat16().flatten(-2)
