"""Use the experts that the rollout engine chose again, in the trainer's forward pass.

    replay = RoutingReplay(chunks)
    with replay.replaying(microbatch, trains=True):     # around the forward pass of each chunk
        hidden_TH = forward_hidden(chunk, microbatch)

A router that sums in another order may choose another expert where two logits are close, and the
token's log-probability then jumps. With replay a position's experts are those that sampled the
response; their probabilities and gradients are the trainer's own (docs/experts.md). Positions that
the engine did not run (golden solutions, padding, a response's last token) are routed as always.
A dense model has no routers. Not here: what the engine sends (rollout/sglang/records.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.recompute import OfMicrobatch
from stable_opd_mcore.records import MicroBatch


class RoutingReplay:
    """The replayed choices of the routers of `chunks`, this rank's part of the trained model."""

    def __init__(self, chunks: Sequence[Module]) -> None:
        self._group = unwrap(chunks[0]).pg_collection.tp
        self._is_cut = unwrap(chunks[0]).config.sequence_parallel
        self._routers: list[_ReplayedRouter] = []
        for chunk in chunks:
            for router in chunk.modules():
                if isinstance(router, TopKRouter):
                    assert router.layer_number is not None, "the layer has set it"
                    replayed = _ReplayedRouter(router.layer_number - 1)
                    router.router_replay = replayed  # pyright: ignore  # Megatron's own hook
                    self._routers.append(replayed)

    @contextmanager
    def replaying(self, batch: MicroBatch, *, trains: bool) -> Iterator[None]:
        """Replay the choices of `batch.routed_experts_TLC` in the forward pass inside the block.

        Args:
            trains: a backward pass follows. Where it runs layers again (recompute), it replays the
                same choices.
        """
        chosen_TLC = batch.routed_experts_TLC
        if chosen_TLC is None or not self._routers:
            yield
            return
        if self._is_cut:
            chosen_TLC = chosen_TLC.chunk(self._group.size())[self._group.rank()]
        for router in self._routers:
            router.chosen_TC.begin(chosen_TLC[:, router.layer].long(), keeps=trains)
        try:
            yield
        finally:
            for router in self._routers:
                router.chosen_TC.end()


class _ReplayedRouter:
    """What Megatron's router asks for its choice, in place of RouterReplay."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.chosen_TC = OfMicrobatch[Tensor]()

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
        chosen_TC = self.chosen_TC.current()
        if chosen_TC is None:
            return own
        indices_TC = torch.where(chosen_TC >= 0, chosen_TC, own[1])
        return scores_TE.gather(1, indices_TC), indices_TC
