"""Copies to the device and back: one buffer, the same values, dtypes and shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from stable_opd_mcore.parallel import transfers
from stable_opd_mcore.parallel.transfers import OnHost, to_device
from tests.models.tiny import microbatch


def test_a_micro_batch_travels_in_one_buffer(monkeypatch):
    """A device other than the CPU; its copy is kept, since the meta device has no values."""
    batch, sent = microbatch([5, 3, 7]), []
    empty = torch.empty

    def kept(size: int, *, dtype: torch.dtype, **unused: object) -> Tensor:
        sent.append(empty(size, dtype=dtype))
        return sent[-1]

    monkeypatch.setattr(transfers.torch, "empty", kept)
    sizes = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)}
    moved = to_device(batch, "meta")
    monkeypatch.undo()
    assert len(sent) == 1
    assert moved.golden_rows_G is batch.golden_rows_G
    del sizes["golden_rows_G"]
    for name, tensor in sizes.items():
        found = getattr(moved, name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        part = sent[0][found.storage_offset() * found.element_size() :][: tensor.nbytes]
        assert torch.equal(part.view(tensor.dtype).view(tensor.shape), tensor), name
    assert {getattr(moved, name).device.type for name in sizes} == {"meta"}
    assert len({getattr(moved, name).untyped_storage()._cdata for name in sizes}) == 1


def test_a_cpu_holds_a_micro_batch_already():
    batch = microbatch([5, 3])
    assert to_device(batch, "cpu") is batch


def test_values_on_the_host_are_those_of_the_tensor():
    assert OnHost(torch.tensor([1.5, 2.5], requires_grad=True)).values().tolist() == [1.5, 2.5]
