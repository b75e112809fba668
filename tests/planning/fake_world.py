"""One rank of a world of any size, without memory or messages: what a model really takes there.

A fake process group answers every collective and fake tensors have shapes only, so that the real
`start_world`, `build_model`, gradient buffers and forward pass run on one CPU in a second. Sizes,
shapes and group sizes are real. Speed and numbers are not, and neither are Transformer Engine's
layers.

    with fake_world(ParallelConfig(tensor=4), gpus=64) as world, FakeTensorMode(...):
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models import attention, hidden_states
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, forward_hidden
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import MicroBatch


@contextlib.contextmanager
def fake_world(parallel: ParallelConfig, gpus: int, rank: int = 0) -> Iterator[World]:
    """The world as `rank` of `gpus` ranks sees it."""
    new_group = dist.new_group

    def fake_group(ranks: Any = None, *unused: Any, **also_unused: Any) -> Any:
        return new_group(ranks, backend="fake")

    def gather_object(items: list[Any], item: Any, group: Any = None) -> None:
        items[:] = [item] * len(items)

    def no_fork(*unused: Any, **also_unused: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()  # the tracker compares generator states by value

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)
    try:
        with (
            patch.object(dist, "new_group", fake_group),
            patch.object(dist, "all_gather_object", gather_object),
            patch.object(megatron_random.CudaRNGStatesTracker, "fork", no_fork),
            patch.object(HiddenStatesGPTModel, "to", lambda self, *unused: self),
        ):
            yield start_world(parallel, 0)
    finally:
        stop_world()
        dist.destroy_process_group()


def saved_for_backward(chunk: HiddenStatesGPTModel, tokens: int) -> int:
    """Bytes that one forward pass of a sequence of `tokens` keeps, parameters excluded."""
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # or their memory would be used again, under the same address

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    parameters = {p.untyped_storage()._cdata for p in chunk.parameters()}
    describe = hidden_states._packed_sequences

    def real_description(*arguments: Any) -> Any:
        with unset_fake_temporarily():  # lengths are read by value
            return describe(*arguments)

    def rotary_table(
        module: attention.RotaryByPosition, *unused: Any, **also_unused: Any
    ) -> Tensor:
        width = 2 * module._frequencies.numel()
        return torch.empty(tokens, 1, 1, width, dtype=module._dtype)

    with (
        patch.object(hidden_states, "_packed_sequences", real_description),
        patch.object(attention.RotaryByPosition, "forward", rotary_table),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        forward_hidden(chunk, _one_sequence(tokens))
    return sum(size for storage, size in saved.items() if storage not in parameters)


def fake_tensors() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _one_sequence(tokens: int) -> MicroBatch:
    nothing = torch.zeros(0)
    with unset_fake_temporarily():
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
        positions = torch.arange(tokens)
    return MicroBatch(
        tokens_T=torch.zeros(tokens, dtype=torch.int64),
        positions_T=positions,
        cu_seqlens=cu_seqlens,
        max_seqlen=tokens,
        rows_N=nothing,
        targets_N=nothing,
        sample_index_N=nothing,
        token_index_N=nothing,
        pg_weight_N=nothing,
        kl_weight_N=nothing,
        sft_weight_N=nothing,
        rollout_logprob_N=nothing,
        repetitive_N=nothing,
    )
