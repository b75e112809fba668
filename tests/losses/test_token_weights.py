"""Token weights with global normalisers, against values computed by hand on a small batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.losses.objectives import build_objective
from stable_opd_mcore.losses.token_weights import return_to_go
from stable_opd_mcore.records import Sample
from stable_opd_mcore.sample_facts import SampleWeights
from tests.losses.cases import make_config
from tests.shares import facts_of, sample_of, weights_of, with_gaps


def sample(prompt: str, length: int, kind="rollout", masked=(), reward=None, first=3) -> Sample:
    return sample_of(
        kind=kind,
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
    sample("a", 5, kind="golden"),
    sample("b", 1, kind="golden"),
]


def weights(batch=BATCH, **changes):
    """The weights of the trained tokens of each sample."""
    return build_objective(make_config(**changes), (1,), (1,)).sample_weights(facts_of(batch))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [1 / 8, 1 / 2]),  # a mean of means over trained sequences
        ("token_mean", [1 / 5, 1 / 5]),
        ("constant", [1 / 20, 1 / 20]),  # 2 sequences * max_new_tokens
    ],
)
def test_each_aggregation_has_its_denominator(aggregation, expected):
    found = weights(aggregation=aggregation, sampling__max_new_tokens=10)
    assert found.pg_B.tolist() == [*expected, 0.0, 0.0, 0.0]


def test_the_longest_episode_has_all_its_turns(tmp_path):
    (tmp_path / "envs.py").write_text("def episode(row, seed):\n    yield\n")
    environment = {"function": f"{tmp_path}/envs.py:episode", "max_turns": 4}
    changes = {"sampling__max_new_tokens": 10, "environment": environment}
    found = weights(aggregation="constant", **changes)
    assert found.pg_B.tolist() == [1 / 80, 1 / 80, 0.0, 0.0, 0.0]


def test_kl_is_a_mean_over_all_rollout_tokens_with_masked_ones():
    assert weights(kl__beta=0.9).kl_B.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.0, 0.0])
    assert not weights().kl_B.any()


def test_golden_solutions_have_a_separate_normaliser():
    sft = weights(mixture={"lambda": 0.2}).sft_B.tolist()
    assert sft == pytest.approx([0.0, 0.0, 0.0, 0.02, 0.1])
    sft_only = weights(objective__name="sft")
    assert sft_only.sft_B[3:].tolist() == pytest.approx([0.1, 0.5])
    assert not sft_only.pg_B.any()


def test_grpo_normalises_within_the_group():
    group = [sample("a", 2, reward=r) for r in (1.0, 0.0, 0.0, 0.0)]
    group += [sample("b", 2, reward=1.0), sample("b", 1, reward=1.0), sample("b", 3, "golden")]
    group += [sample("c", 2, reward=1.0), sample("c", 1, reward=0.0)]
    advantages = weights(group, objective__name="grpo").advantage_B
    assert advantages[0] == pytest.approx(1.5, rel=1e-4)  # 0.75 / 0.5, the sample std
    assert advantages[1] == pytest.approx(-0.5, rel=1e-4)
    assert advantages[4:7].tolist() == [0.0, 0.0, 0.0]
    assert advantages[7:].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-4)
    single = [sample("a", 2, reward=1.0), sample("a", 1, kind="golden", reward=1.0)]
    assert weights(single, objective__name="grpo").advantage_B.tolist() == [0.0, 0.0]
    dr = {"objective__name": "grpo", "objective__std_normalise": False, "aggregation": "constant"}
    assert weights(group, **dr).advantage_B[0] == 0.75
    with pytest.raises(
        ValueError, match="prompt 1 in the order of the data: a rollout has no reward"
    ):
        weights([*group[:1], sample("b", 2)], objective__name="grpo")


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_an_episode_without_tokens_changes_no_weight(aggregation):
    """Its environment failed before the student said anything, and its reward is 0."""
    settings = {"objective__name": "grpo", "kl__beta": 0.5, "aggregation": aggregation}
    rewarded = [sample("a", 2, reward=r) for r in (1.0, 0.5)]
    expected = weights([*rewarded, *BATCH], **settings)
    found = weights([*rewarded, sample("a", 0, reward=0.0), *BATCH], **settings)
    for name in ("pg_B", "kl_B", "sft_B", "advantage_B"):
        others = np.delete(getattr(found, name), 2)
        np.testing.assert_array_equal(others, getattr(expected, name), name)
    assert found.pg_B[2] == found.advantage_B[2] == 0.0


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
@pytest.mark.parametrize("rollouts", [1, 4])
def test_the_share_of_the_weight_on_policy_is_the_on_policy_fraction(aggregation, rollouts):
    """At equal lengths, as lambda of GKD, whatever the number of rollouts of a prompt."""
    batch = [
        replace(sample(f"p{i}", 5, source), off_policy=i > 0)
        for i in range(4)
        for source in ["rollout"] * rollouts + ["golden"]
    ]
    settings = {"objective__name": "gkd", "objective__on_policy_fraction": 0.25}
    pg = weights(batch, aggregation=aggregation, sampling__max_new_tokens=10, **settings).pg_B
    on_policy = [weight for weight, s in zip(pg, batch, strict=True) if s.kind == "rollout"]
    assert sum(on_policy) / pg.sum() == pytest.approx(0.25)
    assert 5 * pg.sum() == pytest.approx(0.5 if aggregation == "constant" else 1)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [1 / 12, 1 / 4, 1 / 4]),  # four sequences of 3, 1, 2 and 2 tokens
        ("token_mean", [1 / 8, 1 / 8, 1 / 4]),
        ("constant", [1 / 40, 1 / 40, 1 / 20]),
    ],
)
def test_an_off_policy_golden_solution_counts_once_for_every_rollout(aggregation, expected):
    batch = [sample("a", 3), sample("a", 1), sample("a", 5, "golden")]
    batch += [sample("b", 7), sample("b", 9), sample("b", 2, "golden")]
    batch = [replace(s, off_policy=s.prompt_id == "b") for s in batch]
    settings = {"objective__name": "gkd", "objective__on_policy_fraction": 0.5}
    found = weights(batch, aggregation=aggregation, sampling__max_new_tokens=10, **settings)
    rollouts, golden = expected[:2], expected[2]
    assert found.pg_B.tolist() == pytest.approx([*rollouts, 0, 0, 0, golden])


def test_gkd_adds_the_golden_solutions_with_weight_lambda():
    """The golden solutions of on- and off-policy prompts are an SFT term of weight lambda."""
    batch = [sample(f"p{i}", 2, source) for i in range(2) for source in ("rollout", "golden")]
    for fraction in (1.0, 0.5):
        config = make_config(
            objective__name="gkd", objective__on_policy_fraction=fraction, mixture={"lambda": 0.2}
        )
        objective = build_objective(config, (1,), (1,))
        assert objective.needs_golden
        found = objective.sample_weights(facts_of(batch))
        assert found.sft_B.tolist() == pytest.approx([0.0, 0.05] * 2)
        assert 2 * found.pg_B.sum() == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_an_episode_counts_once_however_many_samples_it_has(aggregation, seed):
    """Random episodes, some without a trained token, each cut into three samples."""
    rng = np.random.default_rng(seed)
    episodes, parts, numbers = [], [], []
    for number, kind in enumerate(rng.permutation(["rollout"] * 8 + ["golden"] * 4).tolist()):
        prompt, length, masked, reward = rng.integers([0, 1, 0, 0], [3, 9, 9, 2]).tolist()
        one = sample(f"p{prompt}", length, kind, range(masked), reward)
        episodes.append(one := replace(one, off_policy=prompt == 2))
        cuts = [0, *sorted(rng.integers(0, length + 1, 2).tolist()), length]
        for cut in map(slice, cuts, cuts[1:]):
            parts.append(replace(one, places=one.places[cut], trained=one.trained[cut]))
            numbers.append(number)
    changes = {"objective__name": "grpo", "objective__std_normalise": False, "kl__beta": 0.9}
    changes |= {"mixture__lambda": 0.2, "sampling__max_new_tokens": 10, "aggregation": aggregation}
    objective = build_objective(make_config(**changes), (1,), (1,))
    found = objective.sample_weights(replace(facts_of(parts), episode_B=np.array(numbers)))

    rollouts = [one for one in episodes if one.kind == "rollout"]
    golden = [one for one in episodes if one.kind == "golden" and one.trained.any()]
    names = ("p0", "p1", "p2")
    rewards = {name: [one.reward for one in rollouts if one.prompt_id == name] for name in names}

    def times(one: Sample) -> int:
        if (one.kind == "golden") != one.off_policy or not one.trained.any():
            return 0
        return 1 if one.kind == "rollout" else len(rewards[one.prompt_id])

    for place, number in enumerate(numbers):
        one, length = episodes[number], episodes[number].trained.sum()
        denominator = {
            "sequence_mean": sum(map(times, episodes)) * length,
            "token_mean": sum(times(each) * each.trained.sum() for each in episodes),
            "constant": sum(map(times, episodes)) * 10,
        }[aggregation]
        expected = SampleWeights(
            pg_B=times(one) / denominator if times(one) else 0.0,
            kl_B=0.9 / sum(len(each.places) for each in rollouts) if one in rollouts else 0.0,
            sft_B=0.2 / (len(golden) * length) if one in golden else 0.0,
            advantage_B=one.reward - np.mean(rewards[one.prompt_id]) if one in rollouts else 0.0,
        )
        for name, value in vars(expected).items():
            assert getattr(found, name)[place] == pytest.approx(value), name


def test_returns_are_discounted_sums_in_any_order():
    for discount, length in [(0.5, 1), (0.5, 2), (0.5, 5), (1.0, 8)]:
        rng = torch.Generator().manual_seed(length)
        order = torch.randperm(2 * length, generator=rng)
        sample, token = (order // length) * 3 + 1, order % length
        values = torch.randn(2 * length, generator=rng, dtype=torch.float64)
        found = return_to_go(values, sample, token, discount)
        expected = [
            sum(
                float(values[j]) * discount ** int(token[j] - token[i])
                for j in range(2 * length)
                if sample[j] == sample[i] and token[j] >= token[i]
            )
            for i in range(2 * length)
        ]
        torch.testing.assert_close(found, torch.tensor(expected).double())
        assert return_to_go(values[:0], sample[:0], token[:0], discount).shape == (0,)


def test_returns_pass_over_observed_tokens():
    """They have no value, and add nothing to the distance between two sampled ones."""
    samples = [with_gaps(sample("a", length)) for length in (7, 1, 11)]
    (batch,) = pack(samples, weights_of(samples, pg=1.0), max_tokens=99)
    values = torch.randn(len(batch.rows_N), dtype=torch.float64)
    found = return_to_go(values, batch.sample_index_N, batch.token_index_N, 0.5)
    places = list(zip(batch.sample_index_N.tolist(), batch.rows_N.tolist(), strict=True))
    for (number, row), value in zip(places, found.tolist(), strict=True):
        later = [n for n, place in enumerate(places) if place[0] == number and place[1] >= row]
        later.sort(key=lambda n: places[n][1])
        terms = [float(values[n]) * 0.5**distance for distance, n in enumerate(later)]
        assert value == pytest.approx(sum(terms))


def test_every_source_has_a_normaliser_of_its_own():
    """docs/method.md §6: the mean over sources, by their weights, of each one's own terms."""
    sources = [{"path": name, "weight": weight} for name, weight in (("x", 3), ("y", 1), ("z", 4))]
    changes = {"objective__name": "grpo", "kl__beta": 0.9, "mixture__lambda": 0.5}
    config = make_config(**changes, normaliser="per_source", data__train=sources)
    batch = [
        *BATCH,
        sample("c", 6, reward=1.0),
        sample("c", 2, reward=0.0),
        sample("c", 3, "golden"),
    ]
    facts = replace(facts_of(batch), source_B=np.array([0] * 5 + [1] * 3))  # none of the third
    by_source = [weights(part, **changes) for part in (BATCH, batch[5:])]
    found = build_objective(config, (1,), (1,)).sample_weights(facts)
    for name in ("pg_B", "kl_B", "sft_B", "advantage_B"):
        shares = (1, 1) if name == "advantage_B" else (3 / 4, 1 / 4)
        parts = zip(by_source, shares, strict=True)
        expected = [share * value for part, share in parts for value in getattr(part, name)]
        assert getattr(found, name).tolist() == pytest.approx(expected), name
