"""How many trained positions each expert was chosen for, over all ranks.

    load = ExpertLoad(chunks)
    with load.counting(microbatch):     # around the forward pass of each chunk
        hidden_TH = forward_hidden(chunk, microbatch)
    metrics = load.take()               # after the step's micro-batches, on every rank together

A position is a token whose successor is a response token, so padding, which depends on the layout,
is not counted and every layout gives the same numbers (docs/method.md §5). Activation recompute
runs a layer again outside `counting` and is not counted twice. A dense model has no routers: its
metrics are empty and nothing is communicated. Not here: the routing itself, which is Megatron's.
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

from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, unwrap
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.records import MicroBatch


class ExpertLoad:
    """Counts of the choices of the routers of `chunks`, this rank's part of the trained model."""

    def __init__(self, chunks: Sequence[Module]) -> None:
        architecture = architecture_of(chunks)
        experts = architecture.experts
        self._chunk = unwrap(chunks[0])
        self._counted_T: Tensor | None = None  # bool: the positions of this rank's tokens
        self._counts_LE: Tensor | None = None  # int64, of all layers; other ranks' stay 0
        if experts is None:
            return
        device = next(chunks[0].parameters()).device
        shape = (architecture.num_layers, experts.number)
        self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=device)
        for chunk in chunks:
            for router in chunk.modules():
                if isinstance(router, TopKRouter):
                    assert router.layer_number is not None, "the layer has set it"
                    router.register_forward_hook(partial(self._count, router.layer_number - 1))

    @contextmanager
    def counting(self, batch: MicroBatch) -> Iterator[None]:
        """Count the choices made inside the block, for the loss rows of `batch`."""
        if self._counts_LE is None:
            yield
            return
        self._counted_T = trained_positions(batch, self._chunk)
        try:
            yield
        finally:
            self._counted_T = None

    def _count(self, layer: int, _router: Module, _inputs: object, routed: Any) -> None:
        if self._counted_T is None:
            return
        assert self._counts_LE is not None
        _, chosen_TE = routed  # probabilities and bool, both [T, E]
        self._counts_LE[layer] += chosen_TE[self._counted_T].sum(dim=0)

    def take(self) -> Metrics:
        """`moe/*` of all positions since the last call, the same on every rank. Collective."""
        counts_LE = self.take_counts()
        return Metrics() if counts_LE is None else load_metrics(counts_LE)

    def take_counts(self) -> Tensor | None:
        """The counts since the last call, over all ranks; None of a dense model. Collective."""
        if self._counts_LE is None:
            return None
        counts_LE = self._counts_LE.clone()
        dist.all_reduce(counts_LE)
        self._counts_LE.zero_()
        return counts_LE


def trained_positions(batch: MicroBatch, chunk: HiddenStatesGPTModel) -> Tensor:
    """bool [T]: which of this rank's tokens of a micro-batch are loss rows."""
    positions_T = torch.zeros_like(batch.tokens_T, dtype=torch.bool)
    positions_T[batch.rows_N] = True
    if not chunk.config.sequence_parallel:
        return positions_T
    group = chunk.pg_collection.tp
    return positions_T.chunk(group.size())[group.rank()]


def load_metrics(counts_LE: Tensor) -> Metrics:
    """The metrics of the choices of E experts in L layers; None values where nothing was counted.

    docs/method.md §5.
    """
    num_layers, num_experts = counts_LE.shape
    mean_L = counts_LE.sum(dim=1).clamp(min=1) / num_experts
    sums = ((counts_LE.amax(dim=1) / mean_L).sum(), (counts_LE == 0).sum(), counts_LE.sum())
    largest, unused, counted = torch.stack([x.double() for x in sums]).tolist()  # one wait
    if not counted:
        num_layers = unused = 0
    return Metrics(
        {
            "moe/load_max_over_mean": Mean(largest, num_layers),
            "moe/unused_experts": Mean(unused, num_layers),
        }
    )
