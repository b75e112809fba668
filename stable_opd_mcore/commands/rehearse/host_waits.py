"""Where a step makes the host wait for the GPU, counted in a fake world.

    with fake_tensors(), HostWaits() as waits:
        ...
    waits.places        # "train/student.py:151 item" -> how often

A wait is an operation that needs values of the device on the host: reading a number, an output
whose size depends on values, a copy that is not asynchronous. Fake tensors are on the device, and
so is what follows from them or from a micro-batch (`to_device`). A copy by OnHost counts where it
is read before the host has waited for something else. Attention and rotary embedding in torch's
layers are left out: Transformer Engine's wait for nothing. Not seen: waits inside compiled
libraries, and Megatron's reading of a shape with each message between pipeline stages.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stable_opd_mcore.commands.rehearse.replacing import replaced
from stable_opd_mcore.parallel import transfers
from stable_opd_mcore.records import MicroBatch
from stable_opd_mcore.train.samples import sharing

_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal"}
_SIZED_BY_VALUES = {"nonzero", "unique", "unique_consecutive", "masked_select", "bincount"}
_COPIES = {"to", "cpu", "cuda"}
_OF_LISTS = {"new_tensor", "tensor"}
_PACKAGE = Path(__file__).parents[2]
_TORCH_LAYERS = ("models/layers/attention.py", "models/layers/rotary.py")


class HostWaits(TorchFunctionMode):
    """Counts while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        # Exceptions by storage: real tensors on the device; copies on the host, with the number of
        # waits when the copy began, or -1 where it has ended.
        self._on_device: dict[int, None] = {}
        self._on_host: dict[int, int] = {}
        self._replaced = ExitStack()

    def __enter__(self) -> HostWaits:
        self._replaced.enter_context(replaced(sharing, to_device=self._to_device))
        tolist = replaced(FakeTensor, tolist=lambda tensor: self._tolist(tensor))
        self._replaced.enter_context(tolist)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._replaced.close()

    def _tolist(self, tensor: FakeTensor) -> Any:
        """FakeTensor's own reads one number after another."""
        if self._is_on_device(tensor) or self._reads_early("tolist", [tensor]):
            self._count("tolist")
        one: Any = 1.0 if tensor.dtype.is_floating_point else 1
        return np.full(tensor.shape, one).tolist()  # what fake_tensors reads

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(self._is_on_device(tensor) for tensor in inputs)
        if name in _COPIES and on_device and _to_host(args[1:], kwargs):
            begun = self.places.total() if kwargs.get("non_blocking") else -1
            if begun < 0:
                self._count(name)
            copy = func(*args, **kwargs).clone()
            _note(self._on_host, copy, begun)
            return copy
        if self._waits(name, args, kwargs, on_device) or self._reads_early(name, inputs):
            self._count(name)
        output = func(*args, **kwargs)
        if on_device:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                    _note(self._on_device, leaf, None)
        return output

    def _waits(self, name: str, args: Any, kwargs: dict[str, Any], on_device: bool) -> bool:
        if name in _OF_LISTS:  # copies from pageable memory
            return "device" in kwargs or (name == "new_tensor" and on_device)
        if not on_device:
            return False
        if name == "__getitem__" or (name == "__setitem__" and isinstance(args[2], Tensor)):
            leaves = tree_leaves(args[1])
            return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in leaves)
        if name == "repeat_interleave":
            return any(isinstance(x, Tensor) for x in args[1:]) and "output_size" not in kwargs
        return name in _READS or name in _SIZED_BY_VALUES or (name == "where" and len(args) == 1)

    def _reads_early(self, name: str, inputs: list[Tensor]) -> bool:
        """Whether a copy is read that nothing has waited for since it began."""
        if name not in _READS:
            return False
        return any(self._on_host.get(_key(x)) == self.places.total() for x in inputs)

    def _is_on_device(self, tensor: Tensor) -> bool:
        key = _key(tensor)
        return key in self._on_device or (
            isinstance(tensor, FakeTensor) and key not in self._on_host
        )

    def _to_device(self, batch: MicroBatch, device: Any) -> MicroBatch:
        for name, value in vars(transfers.to_device(batch, device)).items():
            if isinstance(value, Tensor) and name != "golden_rows_G":
                _note(self._on_device, value, None)
        return batch

    def _count(self, name: str) -> None:
        place = _place()
        if place is not None:
            self.places[f"{place} {name.strip('_')}"] += 1


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _note(found: dict[int, Any], tensor: Tensor, value: Any) -> None:
    storage = tensor.untyped_storage()
    if storage._cdata not in found:
        weakref.finalize(storage, found.pop, storage._cdata, None)
    found[storage._cdata] = value


def _to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy of a tensor on the device names another device: the host's."""
    targets = (*args, *kwargs.values())
    return not targets or any(isinstance(x, (str, torch.device)) for x in targets)


def _place() -> str | None:
    """File and line in this package or Megatron; None inside torch's layers."""
    found: str | None = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = name.startswith(str(_PACKAGE)) and "/commands/rehearse/" not in name
        if inside and name.endswith(_TORCH_LAYERS):
            return None
        if found is None and (inside or "/megatron/" in name):
            short = (
                str(Path(name).relative_to(_PACKAGE)) if inside else name[name.index("megatron/") :]
            )
            found = f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return found
