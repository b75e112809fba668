"""The maximal periodic suffix against a brute-force reading of its definition."""

import random

import pytest

from stable_opd_mcore.data.repetition import periodic_suffix, repetitive_mask


def brute_force(tokens, max_period, min_repeats):
    best = 0
    for period in range(1, max_period + 1):
        for length in range(min_repeats * period, len(tokens) + 1):
            suffix = tokens[len(tokens) - length :]
            if all(suffix[k] == suffix[k - period] for k in range(period, length)):
                best = max(best, length)
    return best


def test_random_sequences_over_small_alphabets_match_brute_force():
    rng = random.Random(0)
    found = 0
    for _ in range(400):
        alphabet = rng.choice([1, 2, 3])
        unit = [rng.randrange(alphabet) for _ in range(rng.randint(1, 9))]
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(0, 12))]
        tokens += unit * rng.randint(0, 6) + unit[: rng.randint(0, len(unit))]
        max_period, min_repeats = rng.choice([3, 8, 1024]), rng.choice([2, 3])
        expected = brute_force(tokens, max_period, min_repeats)
        assert periodic_suffix(tokens, max_period, min_repeats) == expected, tokens
        found += expected > 0
    assert 100 < found < 400


@pytest.mark.parametrize("period", [1, 17, 40, 1000])
def test_long_loops_are_found_whole_with_an_incomplete_last_repeat(period):
    rng = random.Random(period)
    unit = [rng.randrange(1000) for _ in range(period)]
    tokens = [2000 + k for k in range(50)] + unit * 4 + unit[: period // 2]
    assert periodic_suffix(tokens) == 4 * period + period // 2


def test_a_period_beyond_the_limit_or_too_few_repeats_do_not_count():
    unit = list(range(30))
    assert periodic_suffix(unit * 3, max_period=29) == 0
    assert periodic_suffix(unit * 3, max_period=30) == 90
    assert periodic_suffix(unit * 2 + unit[:-1]) == 0


def test_a_loop_before_the_end_is_no_repetitive_tail():
    assert repetitive_mask([1, 2] * 10 + [3]) == (False,) * 21
    assert repetitive_mask([9, 8] + [1, 2] * 3) == (False,) * 2 + (True,) * 6
    assert repetitive_mask([]) == ()


def test_one_repeat_is_refused():
    with pytest.raises(ValueError, match="min_repeats=1"):
        periodic_suffix([1, 1], min_repeats=1)
