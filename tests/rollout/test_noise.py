"""Sampling noise: its distribution, what it depends on, and the tokens sampled with it."""

import pytest
import torch

from stable_opd_mcore.rollout.noise import row_key, sample_tokens, uniforms

FIRST = torch.tensor(0)  # position


def keys(count: int, **coordinates) -> torch.Tensor:
    values = {"seed": 0, "step": 0, "prompt_id": "p"} | coordinates
    return torch.tensor([row_key(sample_index=i, **values) for i in range(count)])


def test_splitmix64_reference_outputs():
    # The generator's published first outputs for seed 1234567 (Vigna's splitmix64.c).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = uniforms(torch.tensor(1234567), torch.arange(3))
    assert found.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_uniform_over_rows_and_over_positions():
    rows = uniforms(keys(20000), torch.tensor(7))
    noise = uniforms(keys(1), torch.arange(20001))
    positions, following = noise[:-1], noise[1:]
    for sample in (rows, positions):
        assert sample.min() >= 0
        assert sample.max() < 1
        counts = torch.histc(sample, bins=50, min=0, max=1)
        chi_square = ((counts - 400) ** 2 / 400).sum()
        assert chi_square < 85.4  # 99.9 % quantile at 49 degrees of freedom
    assert abs(torch.corrcoef(torch.stack((positions, following)))[0, 1]) < 0.03


@pytest.mark.parametrize("changed", [{"seed": 1}, {"step": 1}, {"prompt_id": "q"}])
def test_every_coordinate_changes_the_noise(changed):
    before, after = uniforms(keys(2000), FIRST), uniforms(keys(2000, **changed), FIRST)
    assert abs(torch.corrcoef(torch.stack((before, after)))[0, 1]) < 0.08
    first, second = uniforms(keys(2), FIRST)
    assert first != second


def sampled(logits: torch.Tensor, temperature=1.0, top_p=1.0, count=40000):
    return sample_tokens(logits.expand(count, -1), temperature, top_p, uniforms(keys(count), FIRST))


def test_tokens_follow_the_softmax_at_the_temperature():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0])
    for temperature in (1.0, 0.5, 3.0):
        tokens, logprobs = sampled(logits, temperature)
        expected = torch.softmax(logits / temperature, 0)
        counts = torch.bincount(tokens, minlength=5)
        chi_square = ((counts - 40000 * expected) ** 2 / (40000 * expected)).sum()
        assert chi_square < 18.5  # 99.9 % quantile at 4 degrees of freedom
        assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_top_p_keeps_the_smallest_nucleus_and_reports_the_full_softmax():
    probabilities = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05])
    tokens, logprobs = sampled(probabilities.log(), top_p=0.7)
    counts = torch.bincount(tokens, minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[1] / 40000 == pytest.approx(0.625, abs=0.01)
    assert torch.allclose(logprobs.exp(), probabilities[tokens], atol=1e-6)
    tokens, _ = sampled(probabilities.log(), top_p=1e-9, count=100)
    assert (tokens == 1).all()  # the most likely token always stays


def test_tokens_of_probability_zero_are_never_sampled():
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, -torch.inf, 0.5, -1e4, -torch.inf])
    edges = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits.expand(4, -1), 1.0, 1.0, edges)
    assert tokens.tolist() == [1, 1, 1, 4]
    assert torch.isfinite(logprobs).all()
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):  # totals that round in every way
        rows = torch.randn(64, 1000, generator=generator) * 5
        rows[:, 900:] = -torch.inf
        last = torch.full((64,), 1 - 2.0**-53, dtype=torch.float64)
        assert (sample_tokens(rows, 0.7, 1.0, last)[0] < 900).all()


def test_the_tail_of_a_large_vocabulary_is_reached():
    # One token holds nearly all mass before 150,000 tiny ones; fp32 sums would swallow each of
    # these.
    logits = torch.full((1, 150_001), -18.0)
    logits[0, 0] = 0.0
    tail = torch.softmax(logits.double(), 1)[0, 1:].sum().item()
    uniform = torch.tensor([1 - tail * f for f in (0.75, 0.5, 0.25)], dtype=torch.float64)
    tokens, _ = sample_tokens(logits.expand(3, -1), 1.0, 1.0, uniform)
    assert [round(token / 150_000, 2) for token in tokens.tolist()] == [0.25, 0.5, 0.75]


def test_greedy_takes_the_most_likely_token_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    tokens, logprobs = sample_tokens(logits, 0.0, 1.0, None)
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits, 1)[[0, 1], [1, 0]])
