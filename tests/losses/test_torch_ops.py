"""The passes in plain torch: tiles of all sizes, empty shards, dtypes."""

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.losses import torch_ops
from stable_opd_mcore.losses.torch_ops import (
    Normaliser,
    SparseColumns,
    jsd_sums,
    shard_sums,
    write_gradient_,
)
from tests.losses.cases import assert_close, run_definition, run_fused
from tests.losses.variants import case_of

ROWS, COLUMNS, SCALE, BETA = 7, 11, 1.25, 0.3


def random_logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(ROWS, COLUMNS, generator=rng, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("elements", [1, 31, 3 * 31 + 1])
def test_tiles_of_any_size_give_the_loss_of_the_definition(monkeypatch, elements):
    """Tiles of one row (two sizes), and of three. Every kind of dense term, with another."""
    monkeypatch.setattr(torch_ops, "TILE_ELEMENTS", elements)
    for variant in ("opd_vopd", "gkd_forward", "gkd_jsd"):
        case = case_of(variant, 13, 31, temperature=0.8)
        assert_close(run_fused(case, padding=3), run_definition(case), 1e-10)


def test_the_anchor_is_near_the_mean_of_the_other_models_logits():
    """In the student's distribution: their KL would lose its digits otherwise."""
    z, o = random_logits(0), random_logits(1)
    found = shard_sums(z, o, SCALE)
    expected = ((z * SCALE).softmax(1) * (o - z + z.amax(1, True)) * SCALE).sum(1)
    torch.testing.assert_close(found.anchor, expected)
    single = shard_sums(z, None, SCALE)
    assert single[3:] == (None,) * 5
    assert all(torch.equal(a, b) for a, b in zip(single[:3], found[:3], strict=True))


def test_an_empty_shard_has_no_sums_and_no_gradient():
    empty, rows = torch.empty(2, 0), torch.zeros(2)
    found = shard_sums(empty, empty, SCALE)
    assert found.student_max.tolist() == found.other_max.tolist() == [-torch.inf] * 2
    sums = ("student_sum", "student_dot", "other_sum", "student_gap", "other_gap", "anchor")
    assert not any(getattr(found, name).any() for name in sums)
    one = Normaliser(rows, rows)
    assert not jsd_sums(empty, empty, one, one, BETA, SCALE).any()
    nowhere = SparseColumns(torch.full((2, 1), -1), torch.ones(2, 1))
    write_gradient_(empty, one, rows, nowhere, [], SCALE)


def test_sums_are_fp32_for_bf16_logits_and_fp64_for_fp64():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        z = random_logits(0, dtype)
        assert {x.dtype for x in shard_sums(z, z, SCALE)} == {wide}


def test_the_gradient_of_a_confident_token_survives_bf16():
    """p of the target is 1 in bf16, and the gradient c - c p is 4.5e-5."""
    z = torch.tensor([[10.0, 0.0]], dtype=torch.bfloat16)
    target = SparseColumns(torch.tensor([[0]]), torch.ones(1, 1))
    write_gradient_(
        z, Normaliser(z.float().amax(1), torch.full((1,), 4.54e-5)), torch.ones(1), target, [], 1.0
    )
    torch.testing.assert_close(z.float(), torch.tensor([[4.54e-5, -4.54e-5]]), rtol=1e-2, atol=0)
