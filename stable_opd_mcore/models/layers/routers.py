"""The routers of a mixture of experts: their choices are counted and replayed.

    routers = Routers(chunks)
    with routers.applying(microbatch, trains=True):     # around the forward pass of each chunk
        hidden_TH = forward_hidden(chunk, microbatch)
    metrics = routers.take()            # after the backward pass, on every rank together

The trained positions are counted: tokens whose successor is a sampled token. So every layout gives
the same numbers (docs/method.md §5). A micro-batch with `routed_experts_TYX` replays the rollout
engine's choices; probabilities and gradients are the trainer's own (docs/experts.md).

Y layers, E experts, X chosen experts of a token, T this rank's tokens of a micro-batch, N its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.records import MicroBatch


class Routers:
    """The routers of `chunks`, this rank's part of a model."""

    def __init__(self, chunks: Sequence[Module]) -> None:
        architecture, device = architecture_of(chunks), next(chunks[0].parameters()).device
        self._chunk, self._experts = unwrap(chunks[0]), architecture.experts
        self._num_dense_layers = architecture.num_dense_layers
        shape = (architecture.num_layers, self._experts.number if self._experts else 0)
        # All layers; those of other ranks stay 0.
        self.counts_YE = torch.zeros(shape, dtype=torch.int64, device=device)
        self._routers = [
            _Router(module, self)
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, TopKRouter)
        ]

    @contextmanager
    def applying(self, batch: MicroBatch, *, trains: bool, counts: bool = True) -> Iterator[None]:
        """Count and replay the choices of `batch` in the forward pass inside the block.

        trains: a backward pass follows; where it runs layers again, they replay the same choices.
        counts: False: the choices are only replayed.
        """
        if not self._routers:
            yield
            return
        chosen_TYX = batch.routed_experts_TYX
        rows_T = torch.zeros_like(batch.tokens_T)  # a token may be the row of several sequences
        rows_T.index_add_(0, batch.rows_N, torch.ones_like(batch.rows_N))
        if self._chunk.config.sequence_parallel:
            group = self._chunk.pg_collection.tp
            rows_T = rows_T.chunk(group.size())[group.rank()]
            if chosen_TYX is not None:
                chosen_TYX = chosen_TYX.chunk(group.size())[group.rank()]
        for router in self._routers:
            router.begin(
                _MicroBatchChoices(
                    rows_T=rows_T if counts else None,
                    chosen_TX=None if chosen_TYX is None else chosen_TYX[:, router.layer].long(),
                    trains=trains,
                )
            )
        try:
            yield
        finally:
            for router in self._routers:
                router.end()

    def take(self) -> Metrics:
        """The `moe/*` metrics since the last call, equal on all ranks; empty for a dense model."""
        if self._experts is None:
            return Metrics()
        counts_YE = self.counts_YE.clone()
        dist.all_reduce(counts_YE)
        self.counts_YE.zero_()
        return load_metrics(counts_YE[self._num_dense_layers :])


class _MicroBatchChoices(NamedTuple):
    """What a router does with a micro-batch."""

    rows_T: Tensor | None  # loss rows of each token; None: nothing is counted
    chosen_TX: Tensor | None  # replayed choices, -1 for the router's own; None: all are its own
    trains: bool


class _Router:
    """The hooks of one router, and its `router_replay` in place of Megatron's RouterReplay.

    A router runs again where activation recompute runs its layer in the backward pass, maybe after
    forward passes of other micro-batches. The micro-batches of a chunk are computed backward in
    their order, so a queue knows whose it is.
    """

    def __init__(self, router: TopKRouter, routers: Routers) -> None:
        assert router.layer_number is not None, "the layer has set it"
        self.layer = router.layer_number - 1
        self._routers = routers
        self._value: _MicroBatchChoices | None = None  # set during the forward pass
        self._for_recompute: deque[_MicroBatchChoices] = deque()
        self._now: _MicroBatchChoices | None = None  # set while the router runs
        router.router_replay = self  # pyright: ignore  # Megatron's own hook
        router.register_forward_pre_hook(self._before)
        router.register_forward_hook(self._after)

    def begin(self, value: _MicroBatchChoices) -> None:
        self._value = value

    def end(self) -> None:
        self._value = None

    def _before(self, _router: Module, _inputs: object) -> None:
        self._now = self._value
        if self._now is None:
            self._now = self._for_recompute.popleft() if self._for_recompute else None
        elif self._now.trains and not torch.is_grad_enabled():  # the backward pass runs it again
            self._for_recompute.append(self._now)

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the chosen experts, both [T, topk]; Megatron's signature."""
        own: Any = choose(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        if self._now is None or self._now.chosen_TX is None:
            return own
        indices_TX = torch.where(self._now.chosen_TX >= 0, self._now.chosen_TX, own[1])
        return scores_TE.gather(1, indices_TX), indices_TX

    def _after(self, _router: Module, _inputs: object, routed: tuple[Tensor, Tensor]) -> None:
        now, is_first_run = self._now, self._value is not None
        if now is None or now.rows_T is None or not is_first_run:
            return
        _, chosen_TE = routed  # probabilities and bool
        self._routers.counts_YE[self.layer] += (chosen_TE * now.rows_T[:, None]).sum(dim=0)


def load_metrics(counts_YE: Tensor) -> Metrics:
    """The metrics of the choices of E experts in Y layers; None values where nothing is counted."""
    num_layers, num_experts = counts_YE.shape
    mean_Y = counts_YE.sum(dim=1).clamp(min=1) / num_experts
    sums = ((counts_YE.amax(dim=1) / mean_Y).sum(), (counts_YE == 0).sum(), counts_YE.sum())
    largest, unused, counted = torch.stack([x.double() for x in sums]).tolist()  # one wait
    if not counted:
        num_layers = unused = 0
    return Metrics(
        {
            "moe/load_max_over_mean": Mean(largest, num_layers),
            "moe/unused_experts": Mean(unused, num_layers),
        }
    )
