"""What is computed of known rows: accuracies, window means, the first damage."""

import math
from dataclasses import asdict

import pytest

from stable_opd_mcore.commands.report.outcomes import first_damage, outcome, window_means


def evaluated(accuracy: float, greedy: float) -> dict:
    return {
        "eval/accuracy": accuracy,
        "eval_greedy/accuracy": greedy,
        "eval/truncation_rate": 0.5,
        "eval/repetition_rate": 0.25,
    }


def test_a_run_with_rollouts():
    truncation = [0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0]
    repetition = [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5]
    rows = [{"step": 0, **evaluated(0.25, 0.9)}]
    rows += [
        {"step": step, "rollout/truncation_rate": t, "rollout/repetition_rate": r}
        for step, (t, r) in enumerate(zip(truncation, repetition, strict=True), start=1)
    ]
    rows[1] |= evaluated(0.1, 0.9)  # lower than any later one, but before the peak
    rows[2] |= evaluated(0.5, 0.9)
    rows[5] |= evaluated(0.125, 0.1)
    rows[7] |= evaluated(0.375, 0.6)
    # Five-step windows: truncation .5, .7, .7; repetition .1, .2, .3.
    expected = {
        "initial_accuracy": 0.25,
        "peak_accuracy": 0.5,
        "lowest_accuracy_after_peak": 0.125,
        "final_accuracy": 0.375,
        "max_truncation_rate": 0.7,
        "final_truncation_rate": 0.7,
        "max_repetition_rate": 0.3,
        "final_repetition_rate": 0.3,
        "greedy_initial_accuracy": 0.9,
        "greedy_final_accuracy": 0.6,
    }
    assert asdict(outcome(rows)) == pytest.approx(expected)


def test_a_run_without_rollouts_is_read_from_its_evaluations():
    last = evaluated(0.75, 0.8) | {"eval/truncation_rate": 0.125, "eval/repetition_rate": 0.0}
    found = outcome([{"step": 0, **evaluated(0.25, 0.9)}, {"step": 1}, {"step": 2, **last}])
    assert (found.max_truncation_rate, found.final_truncation_rate) == (0.5, 0.125)
    assert (found.final_repetition_rate, found.lowest_accuracy_after_peak) == (0.0, 0.75)
    found = outcome([{"step": 0, "rollout/accuracy": 0.25}, {"step": 1, "rollout/accuracy": 0.5}])
    assert (found.initial_accuracy, found.final_accuracy) == (0.25, 0.5)
    assert math.isnan(found.greedy_final_accuracy)  # what a run does not have
    assert math.isnan(found.max_truncation_rate)


def test_means_of_windows():
    assert window_means([1, 2, 3, 4], window=3) == [2, 3]
    assert window_means([1, 2], window=3) == [1.5]
    assert window_means([]) == []


def test_first_damage_is_truncation_near_its_ceiling_and_not_its_growth():
    def rows(start, end, rate):
        return [{"step": step, "rollout/truncation_rate": rate} for step in range(start, end)]

    healthy = rows(0, 25, 0.0) + rows(25, 30, 0.3) + rows(30, 35, 0.6)
    assert first_damage(healthy + rows(35, 45, 0.8)) is None
    found = first_damage(healthy + rows(35, 45, 0.95))
    assert found is not None
    step, (symptom,) = found
    assert step == 39
    assert (symptom.name, symptom.recent) == ("truncation", pytest.approx(0.95))
    assert first_damage(rows(0, 40, 1.0)) is None  # a run that begins broken
    leap = rows(0, 25, 0.0) + rows(25, 40, 0.8)
    assert first_damage(leap) is not None
    other_data = {"event": "settings_changed", "after_step": 24, "changes": {"data.train": [1, 2]}}
    assert first_damage(leap, [other_data]) is None
