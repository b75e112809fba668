"""The auxiliary loss that balances the load of the experts, where train.moe_aux_loss_coeff asks it.

    balancing = LoadBalancing(chunks, coefficient)
    balancing.weigh(counts_LE)              # choices of the whole minibatch, of all ranks
    with balancing.applying(microbatch):    # around the forward pass of each chunk
        hidden_TH = forward_hidden(chunk, microbatch)
    metrics = balancing.take()              # after the backward pass, on every rank together

For each layer E · Σ_e f_e P_e over the minibatch's trained positions (docs/method.md §11). f_e is
known before, so the loss is a sum over tokens, and packing and layout do not change it. Megatron's
own auxiliary losses take f_e of a micro-batch or of those before it, count the router's choice in
place of a replayed one, and are scaled for losses that are divided by the number of tokens. Not
here: the counts (expert_load.py).

L layers, E experts, T this rank's tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.metrics import Mean, Metrics, Sum
from stable_opd_mcore.models.expert_load import trained_positions
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.recompute import OfMicrobatch
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.records import MicroBatch


class LoadBalancing:
    """The loss of the routers of `chunks`, this rank's part of the trained model.

    Args:
        coefficient: of each layer's loss; 0: there is none.
    """

    def __init__(self, chunks: Sequence[Module], coefficient: float) -> None:
        self.is_on = coefficient > 0
        self._chunk = unwrap(chunks[0])
        self._num_layers = architecture_of(chunks).num_layers
        self._coefficient = coefficient
        self._slopes_LE = torch.zeros(0)  # of each layer's loss by a position's probabilities
        self._total = torch.zeros((), device=next(chunks[0].parameters()).device)
        self._positions: list[OfMicrobatch[Tensor]] = []  # bool [T], one for each router
        if not self.is_on:
            return
        for chunk in chunks:
            for router in chunk.modules():
                if isinstance(router, TopKRouter):
                    assert router.layer_number is not None, "the layer has set it"
                    of_router = OfMicrobatch[Tensor]()
                    self._positions.append(of_router)
                    hook = partial(self._add_loss, router.layer_number - 1, of_router)
                    router.register_forward_hook(hook)

    def weigh(self, counts_LE: Tensor) -> None:
        """Take f of the minibatch that is trained next.

        Args:
            counts_LE: how many of its trained positions chose each expert, over all ranks.
        """
        experts = architecture_of([self._chunk]).experts
        assert experts is not None, "a dense student with a coefficient is refused"
        choices_L1 = counts_LE.sum(dim=1, keepdim=True).clamp(min=1).to(self._total.dtype)
        positions_L1 = choices_L1 / experts.per_token
        self._slopes_LE = experts.number * counts_LE / choices_L1 / positions_L1

    @contextmanager
    def applying(self, batch: MicroBatch) -> Iterator[None]:
        """Let a backward pass through what is computed inside the block descend the loss, too.

        The micro-batches are those that were weighed.
        """
        if not self.is_on:
            yield
            return
        positions_T = trained_positions(batch, self._chunk)
        for of_router in self._positions:
            of_router.begin(positions_T, keeps=True)
        try:
            yield
        finally:
            for of_router in self._positions:
                of_router.end()

    def _add_loss(
        self, layer: int, of_router: OfMicrobatch[Tensor], router: Any, inputs: Any, routed: Any
    ) -> Any:
        """A router's forward hook: its output, through which the loss gets its gradient."""
        positions_T = of_router.current()
        if positions_T is None:
            return routed
        logits_TE = router.gating(inputs[0]).flatten(end_dim=-2)
        probabilities_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        loss = (probabilities_TE @ self._slopes_LE[layer] * positions_T).sum()
        if of_router.is_first_run:
            self._total += loss.detach()
        weights_TE, chosen_TE = routed
        return _WithLoss.apply(weights_TE, self._coefficient * loss), chosen_TE

    def take(self) -> Metrics:
        """The loss of all positions since the last call, the same on every rank. Collective."""
        if not self.is_on:
            return Metrics()
        dist.all_reduce(self._total)
        total = float(self._total)
        self._total.zero_()
        weighted = Sum(self._coefficient * total)
        return Metrics(
            {
                "moe/aux_loss": Mean(total, self._num_layers),
                "loss/moe_aux": weighted,
                "loss/total": weighted,  # added to the other parts
            }
        )


class _WithLoss(torch.autograd.Function):
    """A tensor through whose backward pass a scalar is descended, too.

    Megatron's MoEAuxLossAutoScaler scales the scalar by a value of the process; here it is a part
    of the loss as it is.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # position-only `ctx`
        ctx: Any,  # noqa: ARG004
        *grad_outputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        (gradient,) = grad_outputs
        return gradient, torch.ones((), device=gradient.device)
