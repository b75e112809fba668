"""The correction of the train/inference mismatch, token by token."""

import math
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.losses.importance import correct, importance_weights, use_rollout_policy
from stable_opd_mcore.records import Sample, TokenWeights

RATIOS = torch.tensor([1.0, 1.5, 4.0, 0.6, 0.1])


def logs(ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rollout = torch.linspace(-3, -1, len(ratios))
    return rollout + ratios.log(), rollout


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("truncated", [1.0, 1.5, 2.0, 0.6, 0.1]),
        ("masked", [1.0, 1.5, 0.0, 0.6, 0.0]),
    ],
)
def test_each_kind_of_weight(kind, expected):
    weights = importance_weights(*logs(RATIOS), kind, 2.0)
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def batch():
    rollout = Sample("rollout", "p:0", (1, 2), (3, 4, 5), (True,) * 3, (-1.0, -2.0, -0.5))
    golden = Sample("golden", "p:0", (1, 2), (6, 7), (True,) * 2)
    weights = [
        TokenWeights(pg=(0.5, 0.5, 0.0), kl=(0.0,) * 3, sft=(0.0,) * 3),
        TokenWeights(pg=(0.0, 0.0), kl=(0.0,) * 2, sft=(1.0, 1.0)),
    ]
    (packed,) = pack([rollout, golden], weights, max_tokens=64, data_rank=0, data_size=1)
    return packed


def test_only_trained_rollout_tokens_are_weighed_and_counted():
    packed = batch()
    trained = packed.pg_weight_N != 0
    old = torch.where(trained, packed.rollout_logprob_N + math.log(3.0), -1e4)
    (corrected,), metrics = correct([replace(packed, old_logprob_N=old)], "truncated", 2.0)
    assert torch.equal(corrected.pg_weight_N, packed.pg_weight_N * 2.0)
    assert torch.equal(corrected.sft_weight_N, packed.sft_weight_N)
    values = metrics.values_by_key()
    assert values == {"importance/weight_mean": 2.0, "importance/cut_share": 1.0}


def test_equal_probabilities_change_no_bit():
    packed = replace(batch(), old_logprob_N=batch().rollout_logprob_N)
    (corrected,), _ = correct([packed], "masked", 1.5)
    assert torch.equal(corrected.pg_weight_N, packed.pg_weight_N)


def test_the_rollouts_own_policy_becomes_the_old_one():
    (batch_with,) = use_rollout_policy([batch()])
    assert torch.equal(batch_with.old_logprob_N, batch_with.rollout_logprob_N)
