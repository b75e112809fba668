"""Choices of experts are counted at loss rows alone, and once; a replayed choice replaces the
router's own; and the loss that balances experts is its plain definition over the whole minibatch.
Each also where recompute runs layers again."""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.routers import Routers, load_metrics
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch
from tests.models import tiny

EXPERTS, CHOSEN, LAYERS = 8, 2, 4
ARCHITECTURE = tiny.architecture("qwen3_moe", num_experts_per_tok=CHOSEN)
COEFFICIENT = 0.3
METRICS = ("moe/load_max_over_mean", "moe/unused_experts")


def other_choices(num_tokens: int, seed: int) -> Tensor:
    """[T, L, C]"""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, EXPERTS, (num_tokens, LAYERS, 1), generator=generator)
    return torch.cat((first, (first + 3) % EXPERTS), dim=2).to(torch.int16)


def minibatch(replayed: bool) -> list[MicroBatch]:
    """Unequal micro-batches: of three, of all, and of no trained positions."""
    batches = []
    for seed, (lengths, rows) in enumerate((([5, 4], 3), ([6, 7, 3], 13), ([4], 0))):
        batch = tiny.microbatch(lengths, seed=seed)
        of_rows = {name: getattr(batch, name)[:rows] for name in ("rows_N", "targets_N")}
        routed = other_choices(sum(lengths), seed) if replayed else None
        batches.append(replace(batch, routed_experts_TLC=routed, **of_rows))
    return batches


def main_loss(chunk, batch: MicroBatch) -> Tensor:
    return forward_hidden(chunk, batch)[batch.rows_N].pow(3).sum()  # of squares, norms fix the sum


def gradients(chunk) -> dict[str, Tensor]:
    return {name: w.grad for name, w in chunk.named_parameters() if w.grad is not None}


def seen_by_routers(chunk, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The main loss; logits and choices [L, T, E] of the routers."""
    logits, chosen = [], []

    def keep(router, inputs, routed) -> None:
        logits.append((inputs[0] @ router.weight.T)[:, 0])
        chosen.append(routed[1])

    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    hooks = [router.register_forward_hook(keep) for router in routers]
    loss = main_loss(chunk, batch)
    for hook in hooks:
        hook.remove()
    return loss, torch.stack(logits), torch.stack(chosen)


def defined(world: World, batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor], Tensor]:
    """E * sum_e f_e P_e, mean of layers; the gradients of the main loss with it; the loads."""
    (chunk,) = build_model(ARCHITECTURE, world)
    routers, total, logits, chosen = Routers([chunk]), torch.zeros(()), [], []
    for batch in batches:
        with routers.applying(batch, trains=False):
            loss, logits_LTE, chosen_LTE = seen_by_routers(chunk, batch)
        total = total + loss
        logits.append(logits_LTE[:, batch.rows_N])
        chosen.append(chosen_LTE[:, batch.rows_N])
    p_LE = torch.cat(logits, dim=1).softmax(dim=-1).mean(dim=1)
    chosen_LTE = torch.cat(chosen, dim=1)
    f_LE = chosen_LTE.float().mean(dim=1) / CHOSEN
    value = EXPERTS * (f_LE * p_LE).sum()
    (total + COEFFICIENT * value).backward()
    return value.item() / LAYERS, gradients(chunk), chosen_LTE.sum(dim=1)


@pytest.mark.parametrize(
    ("recompute", "replayed"), [("none", False), ("selective", True), ("full", True)]
)
def test_loads_loss_and_gradients_are_those_of_the_definition(world, recompute, replayed) -> None:
    batches = minibatch(replayed)
    expected, expected_gradients, counts_LE = defined(world, batches)
    (chunk,) = build_model(ARCHITECTURE, world, recompute=recompute)
    routers = Routers([chunk], COEFFICIENT)
    for batch in batches:
        with torch.no_grad(), routers.applying(batch, trains=False):
            forward_hidden(chunk, batch)
    assert torch.equal(routers.counts_LE, counts_LE)
    routers.weigh()
    losses = []
    for batch in batches:  # forward of all, then backward of all, as in a pipeline
        with routers.applying(batch, trains=True):
            losses.append(main_loss(chunk, batch))
    for loss in losses:
        loss.backward()
    main_loss(chunk, batches[0])  # outside the block
    with routers.applying(batches[0], trains=True, counts=False):
        main_loss(chunk, batches[0])
    assert torch.equal(routers.counts_LE, counts_LE)  # once, though layers ran again
    found = routers.take().values_by_key()
    assert {key: found[key] for key in METRICS} == load_metrics(counts_LE).values_by_key()
    assert found["moe/aux_loss"] == pytest.approx(expected, rel=1e-5)
    total = pytest.approx(LAYERS * COEFFICIENT * expected, rel=1e-5)
    assert (found["loss/moe_aux"], found["loss/total"]) == (total, total)
    again = routers.take().values_by_key()  # nothing since the last call
    assert again["loss/moe_aux"] == 0
    assert [again[key] for key in METRICS] == [None, None]
    for name, gradient in gradients(chunk).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=2e-4, atol=1e-5)


def test_other_passes_have_no_loss(world) -> None:
    batch, found = minibatch(replayed=False)[1], []
    for coefficient in (0.0, COEFFICIENT):
        (chunk,) = build_model(ARCHITECTURE, world, recompute="full")
        routers = Routers([chunk], coefficient)
        routers.slopes_LE = torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS)
        if not coefficient:
            with routers.applying(batch, trains=True):
                main_loss(chunk, batch).backward()
            assert routers.take().keys() == set(METRICS)
        else:
            main_loss(chunk, batch).backward()  # outside the block
        found.append(gradients(chunk))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_own_choice_changes_nothing_and_another_one_is_followed(world) -> None:
    (chunk,) = build_model(ARCHITECTURE, world, trainable=False)
    batch = tiny.microbatch([5, 7])
    own, _, chosen_LTE = seen_by_routers(chunk, batch)
    routers = Routers([chunk])

    def replayed(experts_TLC: Tensor) -> tuple[Tensor, Tensor]:
        other = replace(batch, routed_experts_TLC=experts_TLC)
        with routers.applying(other, trains=False):
            loss, _, followed_LTE = seen_by_routers(chunk, other)
        return loss, followed_LTE

    indices_TLC = chosen_LTE.nonzero()[:, 2].view(LAYERS, -1, CHOSEN).transpose(0, 1)
    torch.testing.assert_close(replayed(indices_TLC.to(torch.int16))[0], own)
    experts_TLC = other_choices(12, 0)
    wanted_LTE = torch.zeros_like(chosen_LTE).scatter(2, experts_TLC.transpose(0, 1).long(), True)
    experts_TLC[3:5] = -1  # routed as always
    loss, followed_LTE = replayed(experts_TLC)
    assert not torch.allclose(loss, own, atol=1e-3)
    assert torch.equal(followed_LTE[:, 5:], wanted_LTE[:, 5:])
    assert (followed_LTE.sum(dim=2) == CHOSEN).all()
    torch.testing.assert_close(main_loss(chunk, batch), own)  # outside the block


def test_metrics_are_the_means_of_the_layers() -> None:
    counts_LE = torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])
    assert load_metrics(counts_LE).values_by_key() == {
        "moe/load_max_over_mean": (3.0 + 1.0) / 2,
        "moe/unused_experts": (2 + 0) / 2,
    }


def test_a_dense_model_has_no_loads(world) -> None:
    routers = Routers(build_model(tiny.architecture("qwen3"), world))
    with routers.applying(tiny.microbatch([3]), trains=True):
        pass
    assert len(routers.take()) == 0
