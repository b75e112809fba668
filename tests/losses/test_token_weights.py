"""Token weights with global normalisers, against values computed by hand on a small batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stable_opd_mcore.losses.objectives import build_objective
from stable_opd_mcore.records import Sample
from tests.losses.cases import make_config


def sample(prompt: str, length: int, source="rollout", masked=(), reward=None, first=3) -> Sample:
    return Sample(
        source=source,
        prompt_id=prompt,
        prompt_token_ids=(5, 6),
        response_token_ids=(first,) * length,
        trained=tuple(t not in masked for t in range(length)),
        reward=reward,
    )


BATCH = [
    sample("a", 4, reward=1.0),
    sample("a", 2, masked=(1,), reward=0.0),
    sample("a", 3, masked=(0, 1, 2), reward=0.0),
    sample("a", 5, source="golden"),
    sample("b", 1, source="golden"),
]


def weights(**changes):
    return build_objective(make_config(**changes), (1,), (1,)).token_weights(BATCH)


def test_sequence_mean_is_a_mean_of_means_over_trained_sequences():
    pg = [w.pg for w in weights(aggregation="sequence_mean")]
    assert pg == [(1 / 8,) * 4, (1 / 2, 0.0), (0.0,) * 3, (0.0,) * 5, (0.0,)]
    assert sum(map(sum, pg)) == pytest.approx(1)


def test_token_mean_counts_trained_tokens():
    pg = [w.pg for w in weights(aggregation="token_mean")]
    assert pg == [(1 / 5,) * 4, (1 / 5, 0.0), (0.0,) * 3, (0.0,) * 5, (0.0,)]


def test_constant_divides_by_max_new_tokens():
    pg = [w.pg for w in weights(aggregation="constant", sampling__max_new_tokens=10)]
    assert pg[0] == (1 / 20,) * 4
    assert pg[1] == (1 / 20, 0.0)


def test_kl_is_a_mean_over_all_rollout_tokens_with_masked_ones():
    kl = [w.kl for w in weights(kl__beta=0.9)]
    assert kl == [pytest.approx((0.1,) * n) for n in (4, 2, 3)] + [(0.0,) * 5, (0.0,)]
    assert not any(map(any, (w.kl for w in weights())))


def test_golden_solutions_have_a_separate_normaliser():
    sft = [w.sft for w in weights(mixture={"lambda": 0.2})]
    assert sft == [(0.0,) * 4, (0.0,) * 2, (0.0,) * 3, pytest.approx((0.02,) * 5), (0.1,)]
    sft_only = [w.sft for w in weights(objective__name="sft")]
    assert sft_only[3] == pytest.approx((0.1,) * 5)
    assert sft_only[4] == (0.5,)
    assert not any(any(w.pg) for w in weights(objective__name="sft"))


def test_sums_of_the_ranks_add_up_to_the_global_mean():
    """A mean of the ranks' means would give the tokens of the shorter rank more weight."""
    losses = [1.0, 10.0]
    batch = [sample("a", 30), sample("b", 2)]
    for aggregation, expected in (("token_mean", (30 + 20) / 32), ("sequence_mean", 5.5)):
        found = build_objective(make_config(aggregation=aggregation), (1,), (1,))
        ranks = [
            sum(w * loss for w in token.pg)
            for token, loss in zip(found.token_weights(batch), losses, strict=True)
        ]
        assert sum(ranks) == pytest.approx(expected)


def test_grpo_normalises_within_the_group():
    group = [sample("a", 2, reward=r) for r in (1.0, 0.0, 0.0, 0.0)]
    group += [sample("b", 2, reward=1.0), sample("b", 1, reward=1.0), sample("b", 3, "golden")]
    objective = build_objective(make_config(objective__name="grpo"), (1,), (1,))
    advantages = [w.advantage for w in objective.token_weights(group)]
    assert advantages[0] == pytest.approx((1.5, 1.5), rel=1e-4)  # 0.75 / 0.5, the sample std
    assert advantages[1] == pytest.approx((-0.5, -0.5), rel=1e-4)
    assert advantages[4:] == [(0.0, 0.0), (0.0,), (0.0,) * 3]
    dr = make_config(objective__name="grpo", objective__std_normalise=False, aggregation="constant")
    assert build_objective(dr, (1,), (1,)).token_weights(group)[0].advantage == (0.75, 0.75)
    with pytest.raises(ValueError, match="prompt a: a rollout has no reward"):
        objective.token_weights([sample("a", 2)])


def test_gkd_trains_off_policy_prompts_on_golden_solutions():
    batch = [sample(f"p{i}", 2, source) for i in range(10) for source in ("rollout", "golden")]
    batch = [replace(s, off_policy=s.prompt_id in ("p0", "p4", "p5")) for s in batch]
    config = make_config(objective__name="gkd", objective__on_policy_fraction=0.7)
    objective = build_objective(config, (1,), (1,))
    assert objective.needs_golden
    trained = [any(w.pg) for w in objective.token_weights(batch)]
    rollouts, golden = trained[::2], trained[1::2]
    assert sum(rollouts) == 7
    assert golden == [not on for on in rollouts]
    assert sum(sum(w.pg) for w in objective.token_weights(batch)) == pytest.approx(1)


def test_gkd_adds_the_golden_solutions_with_weight_lambda():
    """The golden solutions of on- and off-policy prompts are an SFT term of weight lambda."""
    batch = [sample(f"p{i}", 2, source) for i in range(2) for source in ("rollout", "golden")]
    for fraction in (1.0, 0.5):
        config = make_config(
            objective__name="gkd", objective__on_policy_fraction=fraction, mixture={"lambda": 0.2}
        )
        objective = build_objective(config, (1,), (1,))
        assert objective.needs_golden
        weights = objective.token_weights(batch)
        assert [w.sft for w in weights] == [(0.0,) * 2, pytest.approx((0.05,) * 2)] * 2
        assert sum(sum(w.pg) for w in weights) == pytest.approx(1)


def test_a_group_of_one_rollout_has_no_advantage():
    config = make_config(objective__name="grpo")
    alone = [sample("a", 2, reward=1.0), sample("a", 1, source="golden", reward=1.0)]
    weights = build_objective(config, (1,), (1,)).token_weights(alone)
    assert [w.advantage for w in weights] == [(0.0, 0.0), (0.0,)]
