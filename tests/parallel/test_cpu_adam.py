"""The CPU's Adam: it computes torch's updates and has the state layout of the fused optimizers."""

from __future__ import annotations

import pytest
import torch

from stable_opd_mcore.parallel.cpu_adam import FusedAdam


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_torchs(weight_decay: float, decoupled: bool) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    optimizers = [FusedAdam(ours, adam_w_mode=decoupled, **settings), kind(theirs, **settings)]
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_adam_has_the_fused_state_layout() -> None:
    """Megatron's distributed checkpoints rely on it: `step` in the group, two moments per
    parameter."""
    weight = torch.nn.Parameter(torch.ones(2))
    idle = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([weight, idle])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[weight]) == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(idle, torch.ones(2))
