"""Copies between host and device that the host does not wait for.

    batch = to_device(batch, world.device)  # copies from pinned memory
    numbers = OnHost(sums_R)                # begins the copy; the device continues
    numbers.values().tolist()               # later: waits only for this copy

Elsewhere `.tolist()`, `.item()`, `bool()`, `.cpu()`, `nonzero` and a copy from pageable memory wait
for all work that was launched before. `stable-opd rehearse` counts such places.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stable_opd_mcore.records import MicroBatch


def to_device(batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """A micro-batch on `device`; golden_rows_G, which the host reads, stays there, pinned."""
    device = torch.device(device)
    if device.type == "cpu":
        return batch
    tensors = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)}
    if device.type == "cuda":
        tensors = {name: x.pin_memory() for name, x in tensors.items()}
    kept = {"golden_rows_G": tensors.pop("golden_rows_G")}
    moved = {name: x.to(device, non_blocking=True) for name, x in tensors.items()}
    return replace(batch, **kept, **moved)


class OnHost:
    """The values of a tensor, on their way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def values(self) -> Tensor:
        """The values on the CPU, once the copy has ended."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
