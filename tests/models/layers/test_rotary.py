"""Rotary positions against their definition."""

import torch

from stable_opd_mcore.models.layers.rotary import rotate, rotations


def test_elements_of_a_pair_are_turned_by_their_angle_with_gradients() -> None:
    torch.manual_seed(0)
    angles = torch.rand(5, 2, 1, 3, dtype=torch.float64)
    heads = torch.randn(5, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    pairs = torch.complex(heads[..., :3], heads[..., 3:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    found = rotate(heads, rotations(angles, torch.float64))
    torch.testing.assert_close(found, torch.cat((pairs.real, pairs.imag), dim=-1))
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotations(angles, x.dtype)), heads)
