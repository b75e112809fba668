"""Choices of experts are counted at loss rows alone, once, and as the router made them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.expert_load import ExpertLoad, load_metrics
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.parallel.world import start_world, stop_world
from tests.models import tiny


@pytest.fixture(scope="module")
def world():
    yield start_world(ParallelConfig(), seed=0)
    stop_world()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_loss_rows_are_counted_once(world, recompute) -> None:
    chunks = build_model(tiny.architecture("qwen3_moe"), world, recompute=recompute)
    load = ExpertLoad(chunks)
    batch = tiny.microbatch([5, 9])
    batch = replace(batch, rows_N=batch.rows_N[:7], targets_N=batch.targets_N[:7])
    with load.counting(batch):
        hidden_TH = forward_hidden(chunks[0], batch)
    hidden_TH.sum().backward()  # runs the layers again
    forward_hidden(chunks[0], batch)  # outside the block: not counted
    assert load._counts_LE is not None
    assert load._counts_LE.sum(dim=1).tolist() == [7 * 3] * 4  # three experts of a row and layer
    assert load._counts_LE.max() <= 7
    assert load.take()["moe/unused_experts"].value() is not None
    assert load.take()["moe/unused_experts"].value() is None  # nothing since the last call


def test_counts_are_of_the_routers_choice(world) -> None:
    """A router that gives one expert the largest logits at every position."""
    chunks = build_model(tiny.architecture("qwen3_moe", num_experts_per_tok=2), world)
    for name, weight in chunks[0].named_parameters():
        if name.endswith("router.weight"):
            torch.nn.init.zeros_(weight)
    load = ExpertLoad(chunks)
    batch = tiny.microbatch([6, 4])
    with load.counting(batch):
        forward_hidden(chunks[0], batch)
    metrics = load.take().values_by_key()  # ties: the same two experts everywhere
    assert metrics == {"moe/load_max_over_mean": 4.0, "moe/unused_experts": 6.0}


def test_metrics_are_the_means_of_the_layers() -> None:
    counts_LE = torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])
    assert load_metrics(counts_LE).values_by_key() == {
        "moe/load_max_over_mean": (3.0 + 1.0) / 2,
        "moe/unused_experts": (2 + 0) / 2,
    }


def test_a_dense_model_has_no_loads(world) -> None:
    chunks = build_model(tiny.architecture("qwen3"), world)
    load = ExpertLoad(chunks)
    with load.counting(tiny.microbatch([3])):
        pass
    assert len(load.take()) == 0
