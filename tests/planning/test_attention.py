"""Transformer Engine's limit on fused attention under train.deterministic, by hand."""

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.planning.attention import Attention
from stable_opd_mcore.planning.plan import make_plan
from tests.planning.cases import NODE, config_7b


def test_attention_is_fused_below_2_to_the_30_elements():
    assert Attention(1, 1, 2**15).elements == 2**30
    assert not Attention(1, 1, 2**15).is_fused
    below = Attention(1, 1, 2**15 - 1)
    assert below.is_fused
    assert below.trained_bytes(28) == 128 * (2**15 - 1) ** 2
    assert below.scored_bytes == 0
    assert Attention(2, 1, 2**15).trained_bytes(28) == (28 * 6 + 8) * 2**31
    assert Attention(2, 1, 2**15).scored_bytes == 14 * 2**31


def test_the_plan_counts_the_scores_of_unfused_attention_and_says_so(tmp_path):
    deterministic = "train.deterministic=true"
    assert "attention" not in make_plan(config_7b(tmp_path), NODE).table()
    plan = make_plan(config_7b(tmp_path, deterministic), NODE)
    held = {item.name: item for item in plan.memory.components}
    elements = 8 * 7 * 8448**2  # sequences in 32,768 tokens, heads of a tensor rank, longest
    scores = held["attention's scores, unfused"]
    assert (scores.bytes, scores.phases) == ((28 * 6 + 8) * elements, ("update",))
    assert held["frozen attention's scores, unfused"].bytes == 14 * elements
    line = "8 sequences x 7 heads x 8448^2 tokens = 3.72 x 2^30 elements is not fused"
    assert line in plan.table()
    assert plan.choice.best.recompute == "full"  # scores of one layer instead of 28
    short = ("train.micro_batch_tokens=4096", "sampling.max_new_tokens=2048")
    table = make_plan(config_7b(tmp_path, deterministic, *short), NODE).table()
    assert "4 sequences x 7 heads x 2304^2 tokens = 0.14 x 2^30 elements is fused" in table


def test_context_ranks_have_no_unfused_attention(tmp_path):
    config = config_7b(tmp_path, "train.deterministic=true", "parallel.context=2")
    with pytest.raises(UserError, match=r"3\.72 x 2\^30 elements.*parallel\.context=1,"):
        make_plan(config, NODE)
