"""Rotary positions against their definition."""

import pytest
import torch

from stable_opd_mcore.models.rotary import RotaryByPosition, rotate, rotations


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


def test_rotation_depends_on_distance_only() -> None:
    """Dot products of rotated vectors are functions of the positions' difference."""
    rotary = RotaryByPosition(torch.tensor([1.0, 0.1]), torch.float64)
    torch.manual_seed(0)
    a, b = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)

    def dot(position_a: int, position_b: int) -> float:
        rotary.positions = torch.tensor([[position_a, position_b]])
        rotation = rotary(0)
        return (rotate(a, rotation[:1]) * rotate(b, rotation[1:])).sum().item()

    assert dot(3, 1) == pytest.approx(dot(12, 10), rel=1e-6)  # the table holds fp32 angles
    assert dot(3, 1) != pytest.approx(dot(3, 2), rel=1e-2)
