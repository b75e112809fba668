"""The loss that balances experts is its plain definition over the whole minibatch, in value and
gradient, with micro-batches of any size, recompute, and replayed choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.expert_load import ExpertLoad
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.load_balancing import LoadBalancing
from stable_opd_mcore.models.routing_replay import RoutingReplay
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import MicroBatch
from tests.models import tiny

EXPERTS, CHOSEN, LAYERS = 8, 2, 4
ARCHITECTURE = tiny.architecture("qwen3_moe", num_experts_per_tok=CHOSEN)
COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def world():
    yield start_world(ParallelConfig(), seed=0)
    stop_world()


def minibatch(replayed: bool) -> list[MicroBatch]:
    """Unequal micro-batches: of three, of all, and of no trained positions."""
    batches = []
    for seed, (lengths, rows) in enumerate((([5, 4], 3), ([6, 7, 3], 13), ([4], 0))):
        batch = tiny.microbatch(lengths, seed=seed)
        of_rows = {name: getattr(batch, name)[:rows] for name in ("rows_N", "targets_N")}
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(0, EXPERTS, (sum(lengths), LAYERS, 1), generator=generator)
        chosen_TLC = torch.cat((first, (first + 3) % EXPERTS), dim=2).to(torch.int16)
        routed = chosen_TLC if replayed else None
        batches.append(replace(batch, routed_experts_TLC=routed, **of_rows))
    return batches


def main_loss(chunk, batch: MicroBatch) -> Tensor:
    return forward_hidden(chunk, batch)[batch.rows_N].square().sum()


def defined(batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """E * sum_e f_e P_e, mean of layers; and the gradients of the main loss with it."""
    (chunk,) = build_model(ARCHITECTURE, start_world(ParallelConfig(), seed=0))
    logits: dict[int, list[Tensor]] = {i: [] for i in range(LAYERS)}
    chosen: dict[int, list[Tensor]] = {i: [] for i in range(LAYERS)}
    rows_N = torch.zeros(0)

    def keep(router, inputs, routed) -> None:
        logits[router.layer_number - 1].append((inputs[0] @ router.weight.T)[rows_N, 0])
        chosen[router.layer_number - 1].append(routed[1][rows_N])

    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(keep)
    replay, total = RoutingReplay([chunk]), torch.zeros(())
    for batch in batches:
        rows_N = batch.rows_N
        with replay.replaying(batch, trains=False):
            total = total + main_loss(chunk, batch)
    value = torch.zeros(())
    for layer in range(LAYERS):
        p_E = torch.cat(logits[layer]).softmax(dim=-1).mean(dim=0)
        f_E = torch.cat(chosen[layer]).float().mean(dim=0) / CHOSEN
        value = value + EXPERTS * (f_E * p_E).sum()
    (total + COEFFICIENT * value).backward()
    return value.item() / LAYERS, gradients(chunk)


def gradients(chunk) -> dict[str, Tensor]:
    return {name: w.grad for name, w in chunk.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_value_and_gradients_are_those_of_the_definition(world, recompute, replayed) -> None:
    batches = minibatch(replayed)
    expected, expected_gradients = defined(batches)
    (chunk,) = build_model(ARCHITECTURE, world, recompute=recompute)
    load, replay = ExpertLoad([chunk]), RoutingReplay([chunk])
    balancing = LoadBalancing([chunk], COEFFICIENT)
    for batch in batches:
        with torch.no_grad(), load.counting(batch), replay.replaying(batch, trains=False):
            forward_hidden(chunk, batch)
    counts_LE = load.take_counts()
    assert counts_LE is not None
    balancing.weigh(counts_LE)
    losses = []
    for batch in batches:  # forward of all, then backward of all, as in a pipeline
        with balancing.applying(batch), replay.replaying(batch, trains=True):
            losses.append(main_loss(chunk, batch))
    for loss in losses:
        loss.backward()
    found = balancing.take().values_by_key()
    assert found["moe/aux_loss"] == pytest.approx(expected, rel=1e-5)
    total = pytest.approx(LAYERS * COEFFICIENT * expected, rel=1e-5)
    assert (found["loss/moe_aux"], found["loss/total"]) == (total, total)
    assert balancing.take()["loss/moe_aux"].value() == 0  # nothing since the last call
    for name, gradient in gradients(chunk).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=2e-4, atol=1e-5)


def test_other_passes_have_no_loss(world) -> None:
    batch = minibatch(replayed=False)[1]
    found = []
    for coefficient in (0.0, COEFFICIENT):
        (chunk,) = build_model(ARCHITECTURE, world, recompute="full")
        balancing = LoadBalancing([chunk], coefficient)
        balancing.weigh(torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS))
        if not coefficient:
            with balancing.applying(batch):
                main_loss(chunk, batch).backward()
            assert len(balancing.take()) == 0
        else:
            main_loss(chunk, batch).backward()  # outside the block
        found.append(gradients(chunk))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_an_even_load_has_loss_one(world) -> None:
    (chunk,) = build_model(ARCHITECTURE, world)
    balancing, batch = LoadBalancing([chunk], COEFFICIENT), minibatch(replayed=False)[1]
    rows = len(batch.rows_N)
    balancing.weigh(torch.full((LAYERS, EXPERTS), rows * CHOSEN / EXPERTS))
    with balancing.applying(batch):
        forward_hidden(chunk, batch)
    assert balancing.take()["moe/aux_loss"].value() == pytest.approx(1, rel=1e-5)
