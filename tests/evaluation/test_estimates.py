"""pass@k against the enumeration of all draws; the bootstrap against what is known of means."""

from itertools import combinations

import numpy as np
import pytest

from stable_opd_mcore.evaluation.estimates import bootstrap_interval, pass_at_k


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 2), (6, 1), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(n, c):
    for k in range(1, n + 1):
        draws = list(combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_the_interval_has_the_width_of_a_mean_and_is_the_same_twice():
    values = np.random.default_rng(3).binomial(1, 0.3, 400)
    low, high = bootstrap_interval([values.tolist()])
    spread = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - spread, values.mean() + spread), abs=6e-3)
    assert bootstrap_interval([values.tolist()]) == (low, high)


def test_groups_weigh_the_same_whatever_their_size():
    low, high = bootstrap_interval([[1.0], [0.0] * 50])
    assert (low, high) == (0.5, 0.5)
    few = bootstrap_interval([[0.0, 1.0] * 2, [0.5] * 100])
    assert few[0] < 0.3
    assert few[1] > 0.7
