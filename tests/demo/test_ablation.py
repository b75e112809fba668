"""The ablation's numbers from summaries written by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest

from stable_opd_mcore.demo.ablation import (
    ablation_markdown,
    ablation_rows,
    bootstrap,
)
from stable_opd_mcore.demo.summary import ArmSummary
from stable_opd_mcore.monitoring.outcomes import Outcome

OUTCOME = Outcome(
    initial_accuracy=0.25,
    peak_accuracy=0.75,
    lowest_accuracy_after_peak=0.0,
    final_accuracy=0.5,
    max_truncation_rate=0.5,
    final_truncation_rate=0.0,
    max_repetition_rate=0.0,
    final_repetition_rate=0.0,
    greedy_initial_accuracy=0.5,
    greedy_final_accuracy=0.75,
)


def summary(arm: str, seed: int = 0, **changed: float) -> ArmSummary:
    return ArmSummary("ablation", arm, seed, replace(OUTCOME, **changed))


def test_the_interval_is_that_of_all_resamples():
    values = [0.1, 0.2, 0.4, 0.45, 0.9]
    means = sorted(fmean(resample) for resample in product(values, repeat=len(values)))
    low, high = means[round(0.025 * len(means))], means[round(0.975 * len(means))]
    estimate = bootstrap(values)
    assert estimate.mean == pytest.approx(0.41)
    assert estimate.low == pytest.approx(low, abs=0.02)
    assert estimate.high == pytest.approx(high, abs=0.02)
    assert estimate == bootstrap(values)


def test_equal_values_have_an_interval_of_no_width():
    estimate = bootstrap([0.5] * 3)
    assert (estimate.mean, estimate.low, estimate.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap([])


def test_gains_are_of_the_same_seed():
    arms = [
        summary("opd"),
        summary("opd", seed=1, initial_accuracy=0.5, final_accuracy=0.75),
        summary("sft", greedy_final_accuracy=0.25, max_truncation_rate=0.25),
    ]
    opd, sft = ablation_rows(arms)
    assert (opd.arm, opd.seeds, sft.arm, sft.seeds) == ("opd", 2, "sft", 1)
    # Each seed gains .25, so the interval has no width although the ends differ.
    assert (opd.sampled_gain.low, opd.sampled_gain.high) == (0.25, 0.25)
    assert opd.sampled.mean == 0.625
    assert opd.sampled.low < opd.sampled.high
    assert (opd.seeds_above_start, sft.seeds_above_start) == (2, 0)  # sft: greedy is below
    assert (opd.max_truncation_rate, sft.max_truncation_rate) == (0.5, 0.25)
    assert sft.greedy_gain.mean == -0.25


def test_the_table_names_arms_and_intervals():
    markdown = ablation_markdown(ablation_rows([summary("opd"), summary("student_topk")]))
    assert "| `opd` | 0.50 [0.50, 0.50] | +0.25 [+0.25, +0.25] |" in markdown
    assert "| `student_topk` |" in markdown
    assert "| 1 of 1 | 0.50 |" in markdown
    assert len({line.count("|") for line in markdown.splitlines()}) == 1
