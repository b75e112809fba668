"""The passes in plain torch against sums of whole rows and autograd, in tiles of all sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.losses import torch_ops
from stable_opd_mcore.losses.torch_ops import (
    DenseTerm,
    Normaliser,
    ShardSums,
    SparseColumns,
    jsd_sums,
    shard_sums,
    write_gradient_,
)

close = torch.testing.assert_close
ROWS, COLUMNS, SCALE, BETA = 7, 11, 1.25, 0.3


@pytest.fixture(params=[1, COLUMNS, 3 * COLUMNS + 1, 10**6])
def tile(request, monkeypatch):
    """Tiles of one row (two sizes), of three, and of all."""
    monkeypatch.setattr(torch_ops, "TILE_ELEMENTS", request.param)


def random_logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(ROWS, COLUMNS, generator=draw, dtype=torch.float64)).to(dtype)


def normaliser(logits: Tensor, scale: float = SCALE) -> Normaliser:
    """log_softmax(x) = x - maximum - log_sum of the logits times scale."""
    x = logits.double() * scale
    return Normaliser(x.amax(1), (x - x.amax(1, keepdim=True)).logsumexp(1))


@pytest.mark.usefixtures("tile")
def test_sums_are_relative_to_each_models_own_maximum():
    z, o = random_logits(0), random_logits(1)
    found = shard_sums(z, o, SCALE)
    assert all(x is not None for x in found)
    x, y = z * SCALE, o * SCALE
    anchor = found.anchor[:, None]
    close(found.student_max, x.amax(1))
    close(found.other_max, y.amax(1))
    x_from_max, y_from_max = x - x.amax(1, True), y - y.amax(1, True)
    close(found.student_sum, x_from_max.exp().sum(1))
    close(found.student_dot, (x_from_max.exp() * x_from_max).sum(1))
    close(found.other_sum, y_from_max.exp().sum(1))
    close(found.student_gap, (x_from_max.exp() * (x_from_max - (y - anchor))).sum(1))
    close(found.other_gap, (y_from_max.exp() * (y_from_max - x_from_max)).sum(1))
    close(found.anchor, (x.softmax(1) * (y - x_from_max)).sum(1))
    alone = shard_sums(z, None, SCALE)
    assert alone[3:] == (None,) * 5
    assert all(torch.equal(a, b) for a, b in zip(alone[:3], found[:3], strict=True))


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


@pytest.mark.usefixtures("tile")
def test_jsd_from_its_two_sums():
    z, o = random_logits(0), random_logits(1)
    sums = jsd_sums(z, o, normaliser(z), normaliser(o), BETA, SCALE)
    p, q = (z * SCALE).softmax(1), (o * SCALE).softmax(1)
    m = BETA * q + (1 - BETA) * p
    to_mixture = [(x * (x / m).log()).sum(1) for x in (q, p)]
    close(sums, torch.stack(to_mixture, dim=1))


def divergence(kind: str, log_p: Tensor, log_o: Tensor) -> tuple[Tensor, Tensor]:
    """Value [C], differentiable in log_p, and the centre of its gradient term."""
    reverse = (log_p.exp() * (log_p - log_o)).sum(1)
    if kind == "reverse":
        return reverse, reverse.detach()
    if kind == "forward":
        return (log_o.exp() * (log_o - log_p)).sum(1), torch.full_like(reverse, torch.nan).detach()
    log_m = (BETA * log_o.exp() + (1 - BETA) * log_p.exp()).log()
    from_o, from_p = ((x.exp() * (x - log_m)).sum(1) for x in (log_o, log_p))
    return BETA * from_o + (1 - BETA) * from_p, from_p.detach()


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("kinds", [(), ("reverse",), ("reverse", "forward"), ("reverse", "jsd")])
def test_gradient_equals_autograd(kinds):
    """Row 0's target lies in another shard; the last row has no weights."""
    z, draw = random_logits(0).requires_grad_(), torch.Generator().manual_seed(9)
    coefficients = torch.randn(3, ROWS, generator=draw, dtype=torch.float64)
    coefficients[:, -1] = 0
    target_weight, *weights = coefficients
    target = torch.randint(COLUMNS, (ROWS,), generator=draw)
    log_p = (z * SCALE).log_softmax(1)
    looked_up = log_p.gather(1, target[:, None])[:, 0]
    elsewhere = torch.zeros(ROWS).double()
    elsewhere[0] = target_weight[0]
    # What another shard adds at the target is no part of this one.
    loss = (target_weight * looked_up - elsewhere * SCALE * z[0, target[0]]).sum()
    terms = []
    for seed, (kind, weight) in enumerate(zip(kinds, weights, strict=False), start=1):
        other = random_logits(seed)
        value, centre = divergence(kind, log_p, (other * SCALE).log_softmax(1))
        loss = loss + (weight * value).sum()
        terms.append(DenseTerm(kind, other, normaliser(other), weight, centre, BETA))
    (expected,) = torch.autograd.grad(loss, z)

    columns = target.index_fill(0, torch.tensor([0]), -1)[:, None]
    found = z.detach().clone()
    sparse = SparseColumns(columns, target_weight[:, None])
    write_gradient_(found, normaliser(found), target_weight, sparse, terms, SCALE)
    close(found, expected)
    assert not found[-1].any()


def test_the_gradient_of_a_confident_token_survives_bf16():
    """p of the target is 1 in bf16, and the gradient c - c p is 4.5e-5."""
    z = torch.tensor([[10.0, 0.0]], dtype=torch.bfloat16)
    target = SparseColumns(torch.tensor([[0]]), torch.ones(1, 1))
    write_gradient_(z, normaliser(z, 1.0), torch.ones(1), target, [], 1.0)
    close(z.float(), torch.tensor([[4.54e-5, -4.54e-5]]), rtol=1e-2, atol=0)


def test_zeros_are_columns_of_one_table():
    sums, table = ShardSums.zeros(random_logits(0), None)
    assert table.shape == (ROWS, 3)
    sums.student_dot.fill_(2)
    assert table[:, 2].eq(2).all()
    assert sums.other_max is None
