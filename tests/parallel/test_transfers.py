"""Copies to the device: the same dtypes and shapes."""

from torch import Tensor

from stable_opd_mcore.parallel.transfers import to_device
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
