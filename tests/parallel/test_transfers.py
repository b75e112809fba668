"""Copies to the device and back: the same dtypes, shapes and values."""

import torch
from torch import Tensor

from stable_opd_mcore.parallel.transfers import OnHost, to_device
from tests.models.tiny import microbatch


def test_all_but_the_golden_rows_moves():
    """To a device other than the CPU, which is none of CUDA's."""
    batch = microbatch([5, 3, 7])
    moved = to_device(batch, "meta")
    assert moved.golden_rows_G is batch.golden_rows_G
    for name, tensor in vars(batch).items():
        if isinstance(tensor, Tensor) and name != "golden_rows_G":
            found = getattr(moved, name)
            assert (found.device.type, found.dtype) == ("meta", tensor.dtype), name
            assert found.shape == tensor.shape


def test_a_cpu_holds_a_micro_batch_already():
    batch = microbatch([5, 3])
    assert to_device(batch, "cpu") is batch


def test_values_on_the_host_are_those_of_the_tensor():
    assert OnHost(torch.tensor([1.5, 2.5], requires_grad=True)).values().tolist() == [1.5, 2.5]
