"""Choices of experts are counted only at loss rows, and once; a replayed choice replaces the
router's own, even where recompute runs layers again."""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers.routers import Routers, load_metrics
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch
from tests.models import tiny
from tests.shares import sample_of, weights_of

EXPERTS, CHOSEN, LAYERS = 8, 2, 4
ARCHITECTURE, HYBRID = (
    tiny.architecture(family, num_experts_per_tok=CHOSEN) for family in ("qwen3_moe", "qwen3_next")
)


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
        batches.append(replace(batch, routed_experts_TYX=routed, **of_rows))
    return batches


def main_loss(chunk, batch: MicroBatch) -> Tensor:
    return forward_hidden(chunk, batch)[batch.rows_N].pow(3).sum()  # norms fix the sum of squares


def gradients(chunk) -> dict[str, Tensor]:
    return {name: w.grad for name, w in chunk.named_parameters() if w.grad is not None}


def seen_by_routers(chunk, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The main loss; choices [L, T, E] of the routers."""
    chosen: list[Tensor] = []
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    hooks = [
        router.register_forward_hook(lambda router, inputs, routed: chosen.append(routed[1]))
        for router in routers
    ]
    loss = main_loss(chunk, batch)
    for hook in hooks:
        hook.remove()
    return loss, torch.stack(chosen)


def defined(
    world: World, batches: list[MicroBatch], architecture: Architecture
) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients of the main loss, and the loads [L, E]."""
    (chunk,) = build_model(architecture, world)
    routers, chosen = Routers([chunk]), []
    for batch in batches:
        with routers.applying(batch, trains=False):
            loss, chosen_LTE = seen_by_routers(chunk, batch)
        chosen.append(chosen_LTE[:, batch.rows_N])
        loss.backward()
    return gradients(chunk), torch.cat(chosen, dim=1).sum(dim=1)


@pytest.mark.parametrize(
    ("recompute", "replayed", "architecture"),
    [
        ("none", False, ARCHITECTURE),
        ("selective", True, HYBRID),
        ("full", True, ARCHITECTURE),
        ("full", True, HYBRID),
    ],
)
def test_loads_and_gradients_are_those_of_the_definition(
    world, recompute, replayed, architecture
) -> None:
    batches = minibatch(replayed)
    expected_gradients, counts_YE = defined(world, batches, architecture)
    (chunk,) = build_model(architecture, world, recompute=recompute)
    routers = Routers([chunk])
    losses = []
    for batch in batches:  # forward of all, then backward of all, as in a pipeline
        with routers.applying(batch, trains=True):
            losses.append(main_loss(chunk, batch))
    for loss in losses:
        loss.backward()
    main_loss(chunk, batches[0])  # outside the block
    with routers.applying(batches[0], trains=True, counts=False):
        main_loss(chunk, batches[0])
    assert torch.equal(routers.counts_YE, counts_YE)  # once, though layers ran again
    found = routers.take().values_by_key()
    assert found == load_metrics(counts_YE).values_by_key()
    assert [*routers.take().values_by_key().values()] == [None, None]  # nothing since
    for name, gradient in gradients(chunk).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=2e-4, atol=1e-5)


def test_replayed_choices_of_shared_tokens_give_the_gradients_of_whole_sequences(world) -> None:
    prompt, samples = (1, 2, 3, 4, 5), []
    for seed, response in enumerate(((6, 7), (8, 9, 10), (6, 11, 12))):
        num_tokens = len(prompt) + len(response)
        routed = torch.cat((other_choices(5, 9), other_choices(num_tokens - 6, seed)))
        sample = sample_of("rollout", "p", prompt, response)
        samples.append(replace(sample, routed_experts=routed.numpy()))
    found = []
    for shares in (False, True):
        packed = pack(
            samples,
            weights_of(samples),
            max_tokens=64,
            routing=(LAYERS, CHOSEN),
            share_prefixes=shares,
        )
        (chunk,) = build_model(ARCHITECTURE, world)
        routers, sums = Routers([chunk]), torch.zeros(len(samples), 3)
        for batch in packed:
            with routers.applying(batch, trains=True):
                rows_N = forward_hidden(chunk, batch)[batch.rows_N].pow(3).sum(dim=1)
            rows_N.sum().backward()
            sums[batch.sample_index_N, batch.token_index_N] = rows_N.detach()
        num_tokens = sum(len(batch.tokens_T) for batch in packed)
        found.append((num_tokens, sums, gradients(chunk)))
    (whole, sums, of_whole), (shared, of_shared_sums, of_shared) = found
    assert (whole, shared) == (23, 13)  # the experts of the responses differ
    torch.testing.assert_close(of_shared_sums, sums, rtol=1e-5, atol=1e-4)
    assert of_shared.keys() == of_whole.keys()
    for name, gradient in of_shared.items():
        torch.testing.assert_close(gradient, of_whole[name], rtol=2e-4, atol=1e-5)


def test_own_choice_changes_nothing_and_another_one_is_followed(world) -> None:
    (chunk,) = build_model(ARCHITECTURE, world, trainable=False)
    batch = tiny.microbatch([5, 7])
    own, chosen_LTE = seen_by_routers(chunk, batch)
    routers = Routers([chunk])

    def replayed(experts_TYX: Tensor) -> tuple[Tensor, Tensor]:
        other = replace(batch, routed_experts_TYX=experts_TYX)
        with routers.applying(other, trains=False):
            loss, followed_LTE = seen_by_routers(chunk, other)
        return loss, followed_LTE

    indices_TYX = chosen_LTE.nonzero()[:, 2].view(LAYERS, -1, CHOSEN).transpose(0, 1)
    torch.testing.assert_close(replayed(indices_TYX.to(torch.int16))[0], own)
    experts_TYX = other_choices(12, 0)
    wanted_LTE = torch.zeros_like(chosen_LTE).scatter(2, experts_TYX.transpose(0, 1).long(), True)
    experts_TYX[3:5] = -1  # routed as always
    loss, followed_LTE = replayed(experts_TYX)
    assert not torch.allclose(loss, own, atol=1e-3)
    assert torch.equal(followed_LTE[:, 5:], wanted_LTE[:, 5:])
    assert (followed_LTE.sum(dim=2) == CHOSEN).all()
    torch.testing.assert_close(main_loss(chunk, batch), own)  # outside the block


def test_metrics_are_the_means_of_the_layers() -> None:
    counts_YE = torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])
    assert load_metrics(counts_YE).values_by_key() == {
        "moe/load_max_over_mean": (3.0 + 1.0) / 2,
        "moe/unused_experts": (2 + 0) / 2,
    }


def test_a_dense_model_has_no_loads(world) -> None:
    routers = Routers(build_model(tiny.architecture("qwen3"), world))
    with routers.applying(tiny.microbatch([3]), trains=True):
        pass
    assert len(routers.take()) == 0
