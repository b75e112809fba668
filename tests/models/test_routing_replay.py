"""A replayed choice of experts replaces the router's own, forward, backward and where layers run
again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.routing_replay import RoutingReplay
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import MicroBatch
from tests.models import tiny

ARCHITECTURE = tiny.architecture("qwen3_moe", num_experts_per_tok=2)


@pytest.fixture(scope="module")
def world():
    yield start_world(ParallelConfig(), seed=0)
    stop_world()


def choices(chunk, batch: MicroBatch) -> Tensor:
    """[T, L, C]: the experts that the routers choose by themselves."""
    chosen = []
    hooks = [
        module.register_forward_hook(lambda *of: chosen.append(of[-1][1].nonzero()[:, 1]))
        for module in chunk.modules()
        if isinstance(module, TopKRouter)
    ]
    with torch.no_grad():
        forward_hidden(chunk, batch)
    for hook in hooks:
        hook.remove()
    return torch.stack([layer.view(-1, 2) for layer in chosen], dim=1).to(torch.int16)


def other_choices(num_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 8, (num_tokens, 4, 1), generator=generator)
    return torch.cat((first, (first + 3) % 8), dim=2).to(torch.int16)


def test_own_choice_changes_nothing_and_another_one_is_followed(world) -> None:
    (chunk,) = build_model(ARCHITECTURE, world, trainable=False)
    batch = tiny.microbatch([5, 7])
    own = forward_hidden(chunk, batch)
    replay = RoutingReplay([chunk])
    same = replace(batch, routed_experts_TLC=choices(chunk, batch))
    with replay.replaying(same, trains=False):
        torch.testing.assert_close(forward_hidden(chunk, same), own, rtol=0, atol=1e-6)
    experts_TLC = other_choices(12, 0)
    experts_TLC[3:5] = -1  # routed as always
    other = replace(batch, routed_experts_TLC=experts_TLC)
    with replay.replaying(other, trains=False):
        assert not torch.allclose(forward_hidden(chunk, other), own, atol=1e-3)
        followed_TLC = choices(chunk, other)
    torch.testing.assert_close(followed_TLC.sort().values[5:], experts_TLC.sort().values[5:])
    assert (followed_TLC >= 0).all()
    torch.testing.assert_close(forward_hidden(chunk, batch), own)  # outside the block


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_layers_that_run_again_replay_the_same_choices(world, recompute) -> None:
    """Two micro-batches forward, then both backward in their order, as a pipeline does."""
    grads = []
    for mode in ("none", recompute):
        (chunk,) = build_model(ARCHITECTURE, world, recompute=mode)
        replay = RoutingReplay([chunk])
        losses = []
        for seed in (1, 2):
            batch = tiny.microbatch([6, 4], seed=seed)
            batch = replace(batch, routed_experts_TLC=other_choices(10, seed))
            with replay.replaying(batch, trains=True):
                losses.append(forward_hidden(chunk, batch).square().sum() * seed)
        for loss in losses:
            loss.backward()
        grads.append({name: weight.grad for name, weight in chunk.named_parameters()})
    for name, expected in grads[0].items():
        found = grads[1][name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
