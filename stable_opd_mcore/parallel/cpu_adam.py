"""Adam for the CPU with the interface and the state layout of Transformer Engine's and Apex's
FusedAdam.

State per parameter is `exp_avg` and `exp_avg_sq`; `step` lives in the parameter group. Megatron's
distributed checkpoints depend on that layout. Not used where CUDA is available.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled (`adam_w_mode`) or L2 weight decay; Loshchilov & Hutter 2019, algorithm
    2.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: divide both moments by 1 - beta**step.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **unused,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient, in a few fused calls per group."""
        assert closure is None, "a closure is not supported"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                self._update(group, params)

    def _update(self, group: dict, params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        means = [self.state[param]["exp_avg"] for param in params]
        squares = [self.state[param]["exp_avg_sq"] for param in params]
        grads = [param.grad for param in params]
        (beta1, beta2), step, lr = group["betas"], group["step"], group["lr"]
        if group["weight_decay"] and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, correction2**0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, means, denominators, -lr / correction1)
