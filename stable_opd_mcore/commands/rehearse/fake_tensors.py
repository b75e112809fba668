"""Tensors without memory, and the bytes that they would take.

    with fake_tensors() as live:
        ...                     # build, train
    live.peak_bytes

Floating-point tensors are fake: they have a shape and no values. Integers and booleans that follow
from real data stay real, because packing and attention read lengths by value. A value that is read
from a fake tensor is 1. Not here: process groups (fake_world.py).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stable_opd_mcore.commands.rehearse.replacing import replaced

_aten: Any = torch.ops.aten
_COALESCED = (  # collectives that torch has no fake form of
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default,
    torch.ops.c10d.allgather_into_tensor_coalesced_.default,
    torch.ops.c10d.allreduce_coalesced_.default,
)
_GATHER = torch.ops.c10d._allgather_base_.default
_READS = (_aten.item.default, _aten._local_scalar_dense.default)


@dataclass
class LiveBytes:
    """Bytes of the fake tensors that exist. Tensors that share memory count once."""

    bytes: int = 0
    peak_bytes: int = 0
    _storages: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._storages[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._remove, key)

    def restart(self) -> None:
        """Forget the peak until now."""
        self.peak_bytes = self.bytes

    def _remove(self, key: int) -> None:
        self.bytes -= self._storages.pop(key)


class _Mode(TorchDispatchMode):
    """Decides for every operation whether it runs on real or on fake tensors."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in inputs) and (
            inputs or not _makes_floats(func, args, kwargs)
        ):
            with unset_fake_temporarily():
                if func is _GATHER:  # every rank has the same
                    gathered, own = inputs
                    gathered.view(-1, own.numel()).copy_(own.view(1, -1))
                return func(*args, **kwargs)
        if func in _READS:
            dtype = inputs[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func in (_aten.equal.default, _aten.is_nonzero.default):
            return True
        if func in _COALESCED:
            return FakeWork().boxed()
        if func is _aten.masked_select.default:  # the mask is real: it says how many
            with unset_fake_temporarily():
                chosen = int(inputs[1].sum())
            output = inputs[0].new_empty(chosen)
        else:
            output = func(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, FakeTensor):
                self._live.add(leaf)
        return output


def _makes_floats(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function without tensor arguments, such as torch.empty, makes fractions."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"].is_floating_point
    if func.overloadpacket in (_aten.arange, _aten.full, _aten.scalar_tensor):
        return any(isinstance(argument, float) for argument in args)
    return True


@contextmanager
def fake_tensors() -> Iterator[LiveBytes]:
    """Tensors made inside have no memory; yields what they would take."""
    live = LiveBytes()
    # Megatron writes this process's scale of auxiliary losses into the first tensor that it took.
    scale = replaced(MoEAuxLossAutoScaler, main_loss_backward_scale=None)
    with scale, FakeTensorMode(allow_non_fake_inputs=True), _Mode(live):
        yield live
