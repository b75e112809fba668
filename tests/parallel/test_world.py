"""A world of one rank: started, started again, refused, stopped. Several: test_pipeline.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import start_world, stop_world


def test_starting_again_seeds_again() -> None:
    first = start_world(ParallelConfig(), seed=7)
    drawn = torch.rand(4)
    torch.rand(3)
    second = start_world(ParallelConfig(), seed=7)
    assert torch.equal(torch.rand(4), drawn)
    start_world(ParallelConfig(), seed=8)
    assert not torch.equal(torch.rand(4), drawn)
    assert first.tensor_group is second.tensor_group
    assert first.is_first_stage
    assert first.is_last_stage
    assert (first.token_multiple, first.microbatch_multiple, first.num_chunks) == (1, 1, 1)
    stop_world()
    assert not dist.is_initialized()
    stop_world()


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"context": 2}])
def test_too_few_ranks(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"does not divide the 1 started ranks"):
        start_world(ParallelConfig(**sizes), seed=0)
    assert not dist.is_initialized()


def test_no_microbatches() -> None:
    world = start_world(ParallelConfig(), seed=0)
    with pytest.raises(ValueError, match="no micro-batches"):
        run_forward_backward([], [], lambda chunk, batch: None, world=world)
    stop_world()
