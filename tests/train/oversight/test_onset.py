"""Symptoms against hand-made series: bounds, noise, rare metrics, values that are missing."""

import math
import random
from dataclasses import replace

import pytest

from stable_opd_mcore.monitoring.names import NAMES
from stable_opd_mcore.train.oversight.onset import (
    BASELINE,
    DETECTORS,
    WINDOW,
    Series,
    starts_anew,
    watch,
)


def after(rows, watched=None):
    """What the detectors have learnt after these rows, none of which had a symptom that breaks."""
    watched = watched or {}
    for values in rows:
        watched = watch(watched, values).watched
    return watched


def symptoms_after(rows, watched):
    """The symptoms after more rows, from which nothing is learnt."""
    found, seen = [], dict(watched)
    for values in rows:
        seen, found, _ = watch(seen, values)
        for name, series in seen.items():
            learnt = watched.get(name, Series())
            seen[name] = replace(learnt, recent=series.recent, worth=series.worth)
    return found


def found_in(rows, watched):
    return [DETECTORS[symptom.name].metric for symptom in symptoms_after(rows, watched)]


def test_every_detector_reads_a_metric_that_runs_write():
    assert all(detector.metric in NAMES for detector in DETECTORS.values())


LEAST_CHANGES = [
    ("rollout/truncation_rate", 0.2, 0.29, 0.31),
    ("tokens/repetitive_share", 0.0, 0.09, 0.11),
    ("advantage/abs_share_repetitive", 0.0, 0.04, 0.06),
    ("rollout/repeated_turn_rate", 0.1, 0.24, 0.26),
    ("rollout/truncation_rate_turn_9", 0.2, 0.29, 0.31),
    ("rollout/response_length_mean", 100.0, 124.0, 126.0),
    ("kl/teacher", 0.2, 0.29, 0.31),
    ("kl/teacher", 0.01, 0.05, 0.07),
    ("stop/student_mass", 0.9, 0.71, 0.69),
    ("overlap/student_mass", 0.98, 0.89, 0.87),
]  # metric, normal, inside, outside


def test_metric_is_a_symptom_beyond_its_least_change():
    for metric, normal, inside, outside in LEAST_CHANGES:
        watched = after([{metric: normal}] * BASELINE)
        assert found_in([{metric: inside}] * WINDOW, watched) == []
        assert found_in([{metric: outside}] * WINDOW, watched) == [metric]
        better = 2 * normal - outside
        assert found_in([{metric: better}] * WINDOW, watched) == []


def test_recent_mean_must_fill_its_window_and_rare_metrics_need_one_value():
    watched = after([{"kl/teacher": 0.1, "stop/student_mass": 1.0}] * BASELINE)
    fresh = {name: Series(learnt=s.learnt, normal=s.normal) for name, s in watched.items()}
    assert found_in([{"kl/teacher": 9.0}] * (WINDOW - 1), fresh) == []
    assert found_in([{"kl/teacher": 9.0}] * WINDOW, fresh) == ["kl/teacher"]
    low, high = {"stop/student_mass": 0.1}, {"stop/student_mass": 1.0}
    assert found_in([low], fresh) == ["stop/student_mass"]
    assert found_in([low, high], fresh) == []


def test_nothing_is_a_symptom_before_the_normal_value_is_learnt():
    rows = [{"kl/teacher": 0.1}] * (BASELINE - 1)
    assert found_in([{"kl/teacher": 9.0}] * WINDOW, after(rows)) == []
    assert found_in([{"kl/teacher": 9.0}] * WINDOW, after([*rows, rows[0]])) == ["kl/teacher"]


def test_rare_metrics_wait_for_the_others():
    both = {"kl/teacher": 0.1, "stop/student_mass": 1.0}
    fallen = [{"stop/student_mass": 0.1}]
    rest = [{"kl/teacher": 0.1}] * (BASELINE - 3)
    assert found_in(fallen, after([both] * 2 + rest)) == []
    assert found_in(fallen, after([both] * 2 + [*rest, rest[0]])) == ["stop/student_mass"]
    assert found_in(fallen, after([both, *rest, rest[0], rest[0]])) == []  # one value


def test_noise_of_a_metric_widens_its_bound():
    noise = random.Random(0)
    rows = [{"kl/teacher": noise.choice((0.0, 0.4))} for _ in range(BASELINE)]
    watched = after(rows)
    values = [row["kl/teacher"] for row in rows]
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    assert watched["teacher"].normal == pytest.approx(mean)
    assert watched["teacher"].variance == pytest.approx(spread**2)
    bound = mean + max(0.5 * mean, 4 * spread / math.sqrt(WINDOW))
    (symptom,) = symptoms_after([{"kl/teacher": 50.0}], watched)
    assert symptom.bound == pytest.approx(bound)
    assert symptom.recent == pytest.approx((sum(values[-4:]) + 50) / 5)


def test_learnt_mean_forgets_and_the_start_is_kept():
    def then(count):
        return after([*[{"kl/teacher": 1.0}] * count, {"kl/teacher": 2.0}])["teacher"]

    assert then(9).normal == then(9).start == pytest.approx(1.1)
    assert then(24).normal == pytest.approx(1.04)
    assert then(24).start == 1
    assert then(90).normal == pytest.approx(1 + 1 / 60)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_undefined_values_leave_a_series_as_it_was(value):
    watched = after([{"kl/teacher": 0.1}] * 3)
    assert after([{"kl/teacher": value}, {}], watched) == watched


def test_a_mean_counts_by_the_responses_behind_it():
    """Of ten responses two ended in the second step: it counts a fifth of the first."""
    first, second = (
        {"rollout/accuracy_finished": accuracy, "rollout/truncation_rate": cut}
        for accuracy, cut in ((0.5, 0.0), (1.0, 0.8))
    )
    series = after([first, second])["accuracy"]
    assert series.normal == pytest.approx((0.5 + 0.2 * 1.0) / 1.2)
    assert series.learnt == pytest.approx(1.2)
    episodes = second | {"rollout/episode_truncation_rate": 0.5}  # turns may be cut, and go on
    assert after([first, episodes])["accuracy"].learnt == pytest.approx(1.5)
    none_ended = {"rollout/accuracy_finished": None, "rollout/truncation_rate": 1.0}
    assert after([first, none_ended])["accuracy"] == after([first])["accuracy"]


@pytest.mark.parametrize(
    ("event", "changes", "anew"),
    [
        ("settings_changed", {"optimizer.lr": [1, 2], "data.train.path": ["a", "b"]}, True),
        ("settings_changed", {"contents of data.train=a.jsonl": ["x", "y"]}, True),
        ("settings_changed", {"optimizer.lr": [1, 2], "guard.policy": ["warn", "act"]}, False),
        ("settings_changed", "odd", False),
        ("guard", {"data.train.path": ["a", "b"]}, False),
    ],
)
def test_changed_data_make_other_values_normal(event, changes, anew):
    assert starts_anew({"event": event, "after_step": 3, "changes": changes}) is anew
