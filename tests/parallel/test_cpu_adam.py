"""The CPU's Adam computes torch's updates. Its state: tests/train/persistence."""

import pytest
import torch

from stable_opd_mcore.parallel.cpu_adam import FusedAdam


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_torchs(weight_decay: float, decoupled: bool) -> None:
    torch.manual_seed(0)
    fused_weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    torch_weights = [torch.nn.Parameter(p.detach().clone()) for p in fused_weights]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    optimizers = [
        FusedAdam(fused_weights, adam_w_mode=decoupled, **settings),
        kind(torch_weights, **settings),
    ]
    for _ in range(5):
        for fused, plain in zip(fused_weights, torch_weights, strict=True):
            fused.grad = torch.randn_like(fused)
            plain.grad = fused.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for fused, plain in zip(fused_weights, torch_weights, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-7)
