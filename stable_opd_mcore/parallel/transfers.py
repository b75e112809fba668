"""Copies between host and device that the host does not wait for.

    batch = to_device(batch, world.device)  # one copy, from pinned memory
    numbers = OnHost(sums_R)                # begins the copy; the device goes on
    numbers.values().tolist()               # later: waits for this copy alone

A step so stops for the device only where a number decides what the host does next: the gradient's
norm, and whether the updated weights are finite (train/step.py). Elsewhere `.tolist()`, `.item()`,
`bool()`, `.cpu()`, `nonzero` and a copy from pageable memory wait for all work that was launched
before. `stable-opd rehearse` counts such places (rehearsal/host_waits.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from stable_opd_mcore.records import MicroBatch

_ALIGNMENT = 16  # bytes; a view of the buffer as another dtype needs it


def to_device(batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """A micro-batch from the host on `device`: one copy of one pinned buffer.

    golden_rows_G, which the host reads, stays there; pinned, so that copies of it need no wait.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return batch
    pinned = device.type == "cuda"
    tensors = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)}
    golden_rows_G = tensors.pop("golden_rows_G")
    sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    starts = list(accumulate(sizes, initial=0))[:-1]
    for start, tensor in zip(starts, tensors.values(), strict=True):
        _view(buffer, start, tensor).copy_(tensor)
    moved = buffer.to(device, non_blocking=True)
    return replace(
        batch,
        golden_rows_G=golden_rows_G.pin_memory() if pinned else golden_rows_G,
        **{
            name: _view(moved, start, tensor)
            for start, (name, tensor) in zip(starts, tensors.items(), strict=True)
        },
    )


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """A part of the buffer with the dtype and shape of `like`."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


class OnHost:
    """The values of a tensor, on their way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def values(self) -> Tensor:
        """On the CPU. Waits for the copy, which has ended if the host has waited since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
