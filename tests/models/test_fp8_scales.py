"""The delayed recipe's memory against its definition: passes, recomputation, a checkpoint."""

from __future__ import annotations

import pytest
import torch
from megatron.core import dist_checkpointing

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.models.fp8 import AMAX_HISTORY
from stable_opd_mcore.models.fp8_scales import (
    DelayedScales,
    scales_of,
    set_scales,
    sharded_scales,
)
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.parallel.world import start_world, stop_world
from tests.models import tiny

ARCHITECTURE = tiny.architecture("qwen3", head_dim=16)


@pytest.fixture(scope="module")
def world():
    yield start_world(ParallelConfig(), seed=0)
    stop_world()


def build(world, seed=0, **options):
    (chunk,) = build_model(ARCHITECTURE, world, fp8=Fp8("student", "delayed"), seed=seed, **options)
    return chunk


def run_pass(chunk, seed: int) -> torch.Tensor:
    chunk.zero_grad()
    hidden_TH = forward_hidden(chunk, tiny.microbatch([20, 12], seed))
    hidden_TH.square().sum().backward()
    return hidden_TH.detach()


def gradients(chunk) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in chunk.parameters() if p.grad is not None])


def test_scales_are_those_of_the_largest_magnitude_of_earlier_passes(world):
    scales = DelayedScales(2, world.groups.tp_dp_cp, world.device)
    hidden = torch.ones(1, requires_grad=True)
    amaxes = [(2.0, 7.0), (5.0, 1.0), (0.0, 14.0)]
    of_pass = []
    for input_amax, gradient_amax in amaxes:
        scales.begin()
        of_pass.append(scales.forward(1, torch.tensor([input_amax, 0.5])).tolist())
        scales.end(hidden * 1).backward()
        of_pass[-1].append(float(scales.backward(1, torch.tensor(gradient_amax))))
    assert of_pass == [[1, 1, 1], [224, 896, 8192], [pytest.approx(89.6), 896, 8192]]
    scales.settle()
    memory = scales.of_layer(1)
    assert memory["backward_scale"].tolist() == [4096]
    assert memory["forward_history"][-3:].tolist() == [[2, 0.5], [5, 0.5], [0, 0.5]]
    assert scales.of_layer(0)["forward_scale"].tolist() == [1, 1], "nothing was noted"
    assert memory["forward_history"].shape == (AMAX_HISTORY, 2)


def test_an_old_magnitude_is_forgotten(world, monkeypatch):
    monkeypatch.setattr("stable_opd_mcore.models.fp8_scales.AMAX_HISTORY", 3)
    scales = DelayedScales(1, world.groups.tp_dp_cp, world.device)
    found = []
    for amax in (448.0, 4.0, 4.0, 4.0):
        scales.begin()
        scales.forward(0, torch.tensor([amax, 1.0]))
        scales.end(torch.ones(1, requires_grad=True))
        found.append(float(scales.of_layer(0)["forward_scale"][0]))
    assert found == [1, 1, 1, 112]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_activations_are_rounded_as_the_first_time(world, recompute):
    plain, again = build(world), build(world, recompute=recompute)
    for seed in range(3):
        assert torch.equal(run_pass(plain, seed), run_pass(again, seed))
        torch.testing.assert_close(gradients(again), gradients(plain), rtol=0, atol=0)
    expected, found = scales_of(plain), scales_of(again)
    assert len(expected) == 4 * 4 * 4  # layers, linear layers, names
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_pass_without_gradients_sets_no_scale(world):
    chunk = build(world)
    run_pass(chunk, 0)
    before = {name: value.clone() for name, value in scales_of(chunk).items()}
    with torch.no_grad():
        first = forward_hidden(chunk, tiny.microbatch([20, 12], 1))
        second = forward_hidden(chunk, tiny.microbatch([20, 12], 1))
    assert torch.equal(first, second)
    after = scales_of(chunk)
    assert all(torch.equal(after[name], before[name]) for name in before if "scale" in name)


def test_the_memory_goes_through_a_checkpoint_and_is_no_weight(world, tmp_path):
    chunk, other = build(world), build(world)
    for seed in range(2):
        run_pass(chunk, seed)
    assert not [name for name in chunk.state_dict() if "scale" in name or "history" in name]
    dist_checkpointing.save(sharded_scales([chunk]), str(tmp_path))
    set_scales([other], dist_checkpointing.load(sharded_scales([other]), str(tmp_path)))
    without = build(world)
    for seed in (2, 3):
        expected = run_pass(chunk, seed)
        assert torch.equal(run_pass(other, seed), expected)
        assert torch.equal(gradients(other), gradients(chunk))
        assert not torch.equal(run_pass(without, seed), expected)


def test_other_recipes_have_no_memory(world):
    (chunk,) = build_model(ARCHITECTURE, world, fp8=Fp8("student", "tensorwise"))
    assert scales_of(chunk) == {}
