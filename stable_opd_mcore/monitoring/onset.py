"""Symptoms of a collapse in a run's metrics: which metric left its normal value, and how far.

    watched = observe(watched, values, window)      # one step's metrics
    found = symptoms(watched, window, baseline)
    watched = learn(watched, values, baseline)      # while the run is healthy

A metric is compared with its own past (docs/method.md §9): the mean of the last `window` values
against a mean that follows slowly. Its excess must be larger than the detector's least change and
than the metric's noise. All of it is pure functions of plain numbers. Not here: what is done about
symptoms (train/oversight/guard.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

NOISE = 4.0  # standard errors of the recent mean that a change must exceed
HORIZON = 3  # a normal value forgets after this many times `baseline` values


@dataclass(frozen=True)
class Detector:
    """One metric that a collapse moves."""

    metric: str
    worse: Literal["higher", "lower"]
    absolute: float  # least change that counts, in the metric's unit
    relative: float = 0.0  # and as a share of the normal value; the larger one holds
    damage: bool = False  # responses are broken already, not only drifting
    rare: bool = False  # written every monitoring.overlap_every steps: one value is enough


DETECTORS: dict[str, Detector] = {
    "truncation": Detector("rollout/truncation_rate", "higher", 0.1, damage=True),
    "repetition": Detector("tokens/repetitive_share", "higher", 0.1, damage=True),
    "loop_advantage": Detector("advantage/abs_share_repetitive", "higher", 0.05, damage=True),
    "length": Detector("rollout/response_length_mean", "higher", 0.0, relative=0.25),
    "teacher": Detector("kl/teacher", "higher", 0.05, relative=1.0),
    "stop": Detector("stop/student_mass", "lower", 0.2, rare=True),
    "overlap": Detector("overlap/student_mass", "lower", 0.1, rare=True),
}


@dataclass(frozen=True)
class Series:
    """What is remembered of one detector's metric."""

    recent: tuple[float, ...] = ()  # the last values, oldest first; at most `window`
    learnt: int = 0  # how many values `normal` has learnt from, at most HORIZON * baseline
    normal: float = 0.0  # running mean
    variance: float = 0.0  # of single values about it


@dataclass(frozen=True)
class Symptom:
    """A detector whose metric is beyond its bound."""

    metric: str
    recent: float
    normal: float
    bound: float
    damage: bool


def observe(
    watched: Mapping[str, Series], values: Mapping[str, float | None], window: int
) -> dict[str, Series]:
    """The series with one step's metrics. A metric that is absent or undefined leaves its series
    as it was.
    """
    after = dict(watched)
    for name, value in _finite(values).items():
        detector = DETECTORS[name]
        series = after.get(name, Series())
        kept = 1 if detector.rare else window
        after[name] = replace(series, recent=(*series.recent, value)[-kept:])
    return after


def symptoms(watched: Mapping[str, Series], window: int, baseline: int) -> list[Symptom]:
    """The detectors whose recent mean is beyond its bound, in the order of DETECTORS.

    None before `baseline` steps. A metric that is written rarely needs two values then.
    """
    found: list[Symptom] = []
    if max((series.learnt for series in watched.values()), default=0) < baseline:
        return found
    for name, detector in DETECTORS.items():
        series = watched.get(name, Series())
        needed, wanted = (1, 2) if detector.rare else (window, baseline)
        if len(series.recent) < needed or series.learnt < wanted:
            continue
        recent = math.fsum(series.recent) / len(series.recent)
        least = max(detector.absolute, detector.relative * abs(series.normal))
        noise = NOISE * math.sqrt(series.variance / len(series.recent))
        change = max(least, noise)
        bound = series.normal + (change if detector.worse == "higher" else -change)
        if recent > bound if detector.worse == "higher" else recent < bound:
            found.append(Symptom(detector.metric, recent, series.normal, bound, detector.damage))
    return found


def learn(
    watched: Mapping[str, Series],
    values: Mapping[str, float | None],
    baseline: int,
    rate: float = 1.0,
) -> dict[str, Series]:
    """The series with one step's metrics in the normal values.

    The normal value is the plain mean of the first HORIZON * baseline values; then it forgets.

    Args:
        rate: share of its usual weight that a value has, once `baseline` values are learnt.
    """
    after = dict(watched)
    for name, value in _finite(values).items():
        series = after.get(name, Series())
        learnt = min(series.learnt + 1, HORIZON * baseline)
        weight = (rate if series.learnt >= baseline else 1.0) / learnt
        change = value - series.normal
        after[name] = replace(
            series,
            learnt=learnt,
            normal=series.normal + weight * change,
            variance=(1 - weight) * (series.variance + weight * change * change),
        )
    return after


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """The finite values of the detectors' metrics, by detector."""
    found = {name: values.get(detector.metric) for name, detector in DETECTORS.items()}
    return {n: value for n, value in found.items() if value is not None and math.isfinite(value)}
