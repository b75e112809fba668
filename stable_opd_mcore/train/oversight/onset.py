"""Symptoms of a collapse in a run's metrics: which metric left its normal value, and how far.

    watched = observe(watched, values)      # one step's metrics
    found = symptoms(watched)
    damaged = is_damage(found, watched)
    watched = learn(watched, values)        # while the run is not damaged

A metric is compared with its own past (docs/method.md §9): the mean of the last WINDOW values
against a mean that follows slowly. Its excess must be larger than the detector's least change and
than the metric's noise. Symptoms without damage are drift: truncation also rises to .4 to .8 in
healthy runs, and falls again. Damage is truncation near its ceiling, or its rise together with
loops or with worse answers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

WINDOW = 5  # steps in the recent mean of a metric
BASELINE = 20  # steps after which a normal value is known; before, nothing is a symptom
NOISE = 4.0  # standard errors of the recent mean that a change must exceed
HORIZON = 3  # a normal value forgets after this many times BASELINE values
CEILING = 0.9  # truncation rate above which few responses end by themselves
SMALL_BUDGET = 0.5  # truncation rate at a run's start; above it the budget is small by design


@dataclass(frozen=True)
class Detector:
    """One metric that a collapse moves."""

    metric: str
    worse: Literal["higher", "lower"]
    absolute: float  # least change that counts, in the metric's unit
    relative: float = 0.0  # the same as a share of the normal value; the larger one holds
    broken: bool = False  # a symptom of it makes a rise of truncation damage
    rare: bool = False  # not written in every step: one value is enough


TRUNCATION = "truncation"
DETECTORS: dict[str, Detector] = {
    TRUNCATION: Detector("rollout/truncation_rate", "higher", 0.1),
    "repetition": Detector("tokens/repetitive_share", "higher", 0.1, broken=True),
    "loop_advantage": Detector("advantage/abs_share_repetitive", "higher", 0.05, broken=True),
    "actions": Detector("rollout/repeated_turn_rate", "higher", 0.15, broken=True),
    "accuracy": Detector("rollout/accuracy_finished", "lower", 0.1, broken=True),
    "length": Detector("rollout/response_length_mean", "higher", 0.0, relative=0.25),
    "teacher": Detector("kl/teacher", "higher", 0.05, relative=1.0),
    "stop": Detector("stop/student_mass", "lower", 0.2, rare=True),
    "overlap": Detector("overlap/student_mass", "lower", 0.1, rare=True),
}


@dataclass(frozen=True)
class Series:
    """What is remembered of one detector's metric."""

    recent: tuple[float, ...] = ()  # the last values, oldest first; at most WINDOW
    learnt: int = 0  # how many values `normal` has learnt from, at most HORIZON * BASELINE
    start: float = 0.0  # mean of the first BASELINE values
    normal: float = 0.0  # running mean
    variance: float = 0.0  # squared distance of single values from it, on average


@dataclass(frozen=True)
class Symptom:
    """A detector whose metric is beyond its bound."""

    name: str  # a key of DETECTORS
    recent: float
    normal: float
    bound: float


def observe(watched: Mapping[str, Series], values: Mapping[str, float | None]) -> dict[str, Series]:
    """The series with one step's metrics. A metric that is absent or undefined leaves its series
    as it was.
    """
    after = dict(watched)
    for name, value in _finite(values).items():
        series = after.get(name, Series())
        after[name] = replace(series, recent=(*series.recent, value)[-_window(name) :])
    return after


def symptoms(watched: Mapping[str, Series]) -> list[Symptom]:
    """The detectors whose recent mean is beyond its bound, in the order of DETECTORS.

    None before BASELINE steps. A metric that is written rarely needs two values then. CEILING
    bounds truncation, whatever is normal, unless the budget is small by design.
    """
    found: list[Symptom] = []
    if max((series.learnt for series in watched.values()), default=0) < BASELINE:
        return found
    for name, detector in DETECTORS.items():
        series = watched.get(name, Series())
        wanted = 2 if detector.rare else BASELINE
        if len(series.recent) < _window(name) or series.learnt < wanted:
            continue
        recent = math.fsum(series.recent) / len(series.recent)
        noise = NOISE * math.sqrt(series.variance / len(series.recent))
        change = max(detector.absolute, detector.relative * abs(series.normal), noise)
        bound = series.normal + (change if detector.worse == "higher" else -change)
        if name == TRUNCATION and series.start <= SMALL_BUDGET:
            bound = min(bound, CEILING)
        if recent > bound if detector.worse == "higher" else recent < bound:
            found.append(Symptom(name, recent, series.normal, bound))
    return found


def is_damage(found: Sequence[Symptom], watched: Mapping[str, Series]) -> bool:
    """Whether the symptoms are those of a collapse, and not of growth."""
    cut = next((symptom for symptom in found if symptom.name == TRUNCATION), None)
    if cut is None:
        return False
    capped = cut.recent > CEILING and watched[TRUNCATION].start <= SMALL_BUDGET
    return capped or any(DETECTORS[symptom.name].broken for symptom in found)


def learn(watched: Mapping[str, Series], values: Mapping[str, float | None]) -> dict[str, Series]:
    """The series with one step's metrics in the normal values.

    The normal value is the plain mean of the first HORIZON * BASELINE values; then it forgets.
    After a return to a checkpoint nothing is learnt until the recent mean can judge the run again.
    """
    after = dict(watched)
    for name, value in _finite(values).items():
        series = after.get(name, Series())
        if len(series.recent) < min(_window(name), series.learnt):
            continue
        learnt = min(series.learnt + 1, HORIZON * BASELINE)
        change = value - series.normal
        normal = series.normal + change / learnt
        after[name] = replace(
            series,
            learnt=learnt,
            start=normal if learnt <= BASELINE else series.start,
            normal=normal,
            variance=(1 - 1 / learnt) * (series.variance + change * change / learnt),
        )
    return after


def _window(name: str) -> int:
    return 1 if DETECTORS[name].rare else WINDOW


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """The finite values of the detectors' metrics, by detector."""
    found = {name: values.get(detector.metric) for name, detector in DETECTORS.items()}
    return {n: value for n, value in found.items() if value is not None and math.isfinite(value)}
