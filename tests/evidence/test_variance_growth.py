"""The variance picture: the slopes of LSM's toy (docs/method.md §3), and what they come from."""

import pytest

from docs.evidence.programs.variance_growth import measure, plot_figure, slope


def test_slopes_of_the_toy():
    measured = measure(vocab=3, prompt_spread=1.0, sequences=400, seed=0)
    assert slope(measured[0.0]) == pytest.approx(1.6, abs=0.2)
    assert slope(measured[1.0]) == pytest.approx(3.0, abs=0.25)
    assert len(plot_figure(measured).data) == 3


def test_without_anything_shared_token_level_grows_linearly():
    measured = measure(vocab=3, prompt_spread=0.0, sequences=400, seed=0)
    assert slope(measured[0.0]) == pytest.approx(1.0, abs=0.15)
