"""Rotary positions of Megatron's layers in plain torch, for training and for decoding.

Not used where Transformer Engine is available, except by the embedded engine (rollout/kv_cache.py).
Shapes: s tokens of a sequence, b sequences, D rotated elements of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rotations(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """What `rotate` takes, from angles [..., D/2]: [..., 2 D], cosines and then signed sines."""
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines, -sines, sines), dim=-1).to(dtype)


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate [s, b, heads, D] by [s, b, 1, 2 D]: element i with i + D/2, as transformers does.

    Heads longer than D keep their other elements.
    """
    cosines, signed_sines = rotation.chunk(2, dim=-1)
    size = cosines.shape[-1]
    if size < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :size], rotation), heads[..., size:]), dim=-1)
    rolled = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cosines, rolled, signed_sines)


class RotaryByPosition(torch.nn.Module):
    """Replaces Megatron's: rotations per token; the model sets `positions` before each forward."""

    def __init__(self, frequencies: Sequence[Tensor], dtype: torch.dtype) -> None:
        """frequencies: fp32 [D/2], of each kind of layer."""
        super().__init__()
        self._frequencies = torch.stack(list(frequencies))  # no buffer, to stay out of checkpoints
        self._dtype = dtype
        kinds, half = self._frequencies.shape
        self._table = torch.empty(kinds, 0, half * 4, dtype=dtype)
        self.positions: Tensor | None = None  # [b, s]

    def get_rotary_seq_len(self, *unused: Any, **also_unused: Any) -> int:
        return 0  # Megatron passes it to forward, which ignores it

    def forward(self, unused_length: int, **unused: Any) -> Tensor:
        """[s, b, 1, 2 D] of each kind of layer, for `rotate`."""
        assert self.positions is not None
        longest = int(self.positions.max()) + 1
        if longest > self._table.shape[1] or self._table.device != self.positions.device:
            self._grow(longest)
        return self._table[:, self.positions.transpose(0, 1)].unsqueeze(3)

    def _grow(self, length: int) -> None:
        length = 1 << (length - 1).bit_length()
        assert self.positions is not None
        device = self.positions.device
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = positions[:, None] * self._frequencies.to(device)[:, None]
        self._table = rotations(angles, self._dtype)


class StackedRotary(torch.nn.Module):
    """The rotary embeddings of several kinds of layers, each Megatron's, for Transformer Engine."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        super().__init__()
        self._kinds = tuple(kinds)

    def get_rotary_seq_len(self, *arguments: Any, **options: Any) -> int:
        return self._kinds[0].get_rotary_seq_len(*arguments, **options)

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """What Megatron's gives for each kind of layer."""
        return torch.stack([kind(*arguments, **options) for kind in self._kinds])
