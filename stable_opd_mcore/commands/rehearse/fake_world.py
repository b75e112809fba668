"""One rank of a world of any size, in one process.

    with fake_world(config.parallel, gpus=64, rank=0) as world, fake_tensors() as live: ...

torch's fake process group answers every collective at once and leaves its tensors as they are. What
other pipeline stages would send as Python objects or sizes is computed here. Not here: tensors
(fake_tensors.py), what is run (rank.py).

Letters: T tokens, E experts, C chosen experts of a token.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from stable_opd_mcore.commands.rehearse.replacing import replaced
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models import weights
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.layers.scored_router import ScoredRouter
from stable_opd_mcore.parallel import pipeline
from stable_opd_mcore.parallel.world import World, start_world, stop_world

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@contextmanager
def fake_world(parallel: ParallelConfig, gpus: int, rank: int = 0) -> Iterator[World]:
    """The world as `rank` of `gpus` ranks sees it."""
    new_group = dist.new_group
    messages = _PipelineMessages()

    def fake_group(ranks: Any = None, *unused: Any, **also_unused: Any) -> Any:
        return new_group(ranks, backend="fake")

    def gather_object(items: list[Any], item: Any, **unused: Any) -> None:
        items[:] = [item] * len(items)

    def owners(local: Sequence[tuple[str, ...]], group: dist.ProcessGroup) -> _Owners:
        return _Owners(local, group.size(), parallel.virtual_pipeline or 1)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)
    try:
        with (
            replaced(
                dist,
                new_group=fake_group,
                all_gather_object=gather_object,
                broadcast_object_list=lambda *unused, **also_unused: None,
            ),
            replaced(weights, _owners=owners, _expert_ranks=_expert_ranks),
            replaced(pipeline, get_forward_backward_func=messages.schedule),
            replaced(HiddenStatesGPTModel, to=_convert),
            replaced(router, topk_routing_with_score_function=balanced_routing),
            replaced(ScoredRouter, routing=_balanced_scores),
            replaced(P2PCommunicator, _communicate_shapes=lambda *a, **k: messages.shapes(*a, **k)),
        ):
            yield start_world(parallel, 0)
    finally:
        stop_world()
        dist.destroy_process_group()


def _convert(model: HiddenStatesGPTModel, target: Any) -> HiddenStatesGPTModel:
    """Replaces Module.to, which cannot exchange fake parameters. A device changes nothing."""
    if not isinstance(target, torch.dtype):
        return model
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if old.dtype != target:
                new = torch.nn.Parameter(old.detach().to(target), old.requires_grad)
                vars(new).update(vars(old))  # Megatron's marks
                setattr(module, name, new)
    return model


def balanced_routing(logits_TE: Tensor, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Megatron's probabilities, and a choice of `topk` experts a token that loads all equally."""
    probabilities_TE, _ = topk_routing_with_score_function(logits_TE, topk, **options)
    return probabilities_TE, _equal_shares(*logits_TE.shape, topk)


_scored_routing = ScoredRouter.routing


def _balanced_scores(
    router: ScoredRouter, logits_TE: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """As `balanced_routing`, of another router."""
    probabilities_TE, _ = _scored_routing(router, logits_TE, **options)
    return probabilities_TE, _equal_shares(*probabilities_TE.shape, router.topk)


@lru_cache(maxsize=4)
def _equal_shares(tokens: int, experts: int, topk: int) -> Tensor:
    """[tokens, experts], bool. Not fake: the dispatcher reads how many tokens each expert gets."""
    first_T = topk * torch.arange(tokens)
    indices_TC = (first_T[:, None] + torch.arange(topk)) % experts
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, indices_TC, True)


def _expert_ranks(
    local: Sequence[tuple[str, ...]], group: dist.ProcessGroup
) -> dict[tuple[str, ...], int]:
    """Replaces `models.weights._expert_ranks`: all ranks hold equally many experts, in order."""
    numbers = {int(found[1]) for names in local if (found := _EXPERT.search(names[0]))}
    ranks: dict[tuple[str, ...], int] = {}
    for rank in range(group.size()):
        shift = (rank - group.rank()) * len(numbers)
        for names in local:
            ranks[tuple(_with_expert_shifted(name, shift) for name in names)] = rank
    return ranks


def _with_expert_shifted(name: str, shift: int) -> str:
    return _EXPERT.sub(lambda found: f".experts.{int(found[1]) + shift}.", name)


class _Owners:
    """Pipeline stage of every parameter, computed from the layers of this stage."""

    def __init__(self, local: Sequence[tuple[str, ...]], stages: int, chunks: int) -> None:
        layers = {_layer(names) for names in local} - {None}
        self._layers_per_chunk = len(layers) // chunks
        self._stages = stages

    def __getitem__(self, names: tuple[str, ...]) -> int:
        layer = _layer(names)
        if layer is None:
            return 0 if "embed_tokens" in names[0] else self._stages - 1
        return layer // self._layers_per_chunk % self._stages


def _layer(names: tuple[str, ...]) -> int | None:
    found = re.search(r"\.layers\.(\d+)\.", names[0])
    return int(found[1]) if found else None


class _PipelineMessages:
    """The shapes that neighbouring stages would send before each tensor of a micro-batch."""

    def __init__(self) -> None:
        # Tokens of the micro-batches on this rank's slice, in the order in which they are received:
        # outputs of the stage before, gradients of the next one.
        self._outputs: Iterator[int] = iter(())
        self._gradients: Iterator[int] = iter(())

    def schedule(self) -> Callable[..., Any]:
        """Replaces Megatron's `get_forward_backward_func`: notes the micro-batches' lengths."""
        run = get_forward_backward_func()

        def noting(*, data_iterator: list[Iterator[Any]], **options: Any) -> Any:
            lists = [list(iterator) for iterator in data_iterator]
            self._expect([batch.tokens_T.numel() for batch in lists[0]], num_chunks=len(lists))
            return run(data_iterator=[iter(batches) for batches in lists], **options)

        return noting

    def _expect(self, tokens: Sequence[int], num_chunks: int) -> None:
        stage, stages = get_pipeline_model_parallel_rank(), get_pipeline_model_parallel_world_size()
        order = get_schedule_table(len(tokens), num_chunks, stages)
        is_first, is_last = stage == 0, stage == stages - 1
        # The first stage's first chunk receives no output, the last stage's last chunk no gradient.
        # Gradients pass the chunks in reverse, so that chunk is number 0 of their order.
        self._outputs = iter([tokens[batch] for batch, chunk in order if chunk or not is_first])
        self._gradients = iter([tokens[batch] for batch, chunk in order if chunk or not is_last])

    def shapes(
        self, communicator: Any, _next: Any, _previous: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Replaces P2PCommunicator's exchange: [tokens, 1, hidden] from either side."""
        config = communicator.config
        cut = config.tensor_model_parallel_size if config.sequence_parallel else 1

        def shape(tokens: int) -> list[int]:
            return [tokens // cut, 1, config.hidden_size]

        return (
            shape(next(self._outputs)) if recv_prev else [0, 0, 0],
            shape(next(self._gradients)) if recv_next else [0, 0, 0],
        )
