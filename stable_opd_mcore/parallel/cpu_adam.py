"""Adam for the CPU, with the interface and the state layout of the GPU's fused optimizers.

Transformer Engine's and Apex's FusedAdam keep `exp_avg` and `exp_avg_sq` per parameter and `step`
in the parameter group; Megatron's distributed checkpoints depend on that layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adam import adam


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, or with L2 decay when `adam_w_mode` is False."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,  # given by newer releases of Megatron
    ) -> None:
        assert not capturable, "a CPU captures no CUDA graphs"
        self._decoupled = adam_w_mode
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "a closure is not supported"
        for group in self.param_groups:
            steps_before = group.get("step", 0)
            group["step"] = steps_before + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                self._update(group, params, steps_before)

    def _update(self, group: dict, params: list[torch.Tensor], steps_before: int) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        adam(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            max_exp_avg_sqs=[],
            # The kernel increments these counters itself; it wants one tensor per parameter.
            state_steps=list(torch.full((len(params),), float(steps_before)).unbind()),
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=self._decoupled,
        )
