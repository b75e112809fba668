"""Symptoms of a collapse in a run's metrics: which metric left its normal value, and how far.

    seen = watch(watched, values)      # one step's metrics
    seen.watched, seen.symptoms, seen.damaged

A metric is compared with its own past (docs/method.md §9): the mean of the last WINDOW values
against a mean that follows slowly. Its excess must be larger than the detector's least change and
than the metric's noise. Symptoms without damage are drift: truncation also rises to .4 to .8 in
healthy runs, and falls again. Damage is truncation near its ceiling or leaping, its rise together
with a symptom of broken answers, or a loss of most accuracy (docs/guard.md).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

from stable_opd_mcore.data.responses import turn_parts
from stable_opd_mcore.monitoring.metric_sinks import CHANGED_EVENT

WINDOW = 5  # steps in the recent mean of a metric
BASELINE = 20  # steps after which a normal value is known; before, nothing is a symptom
NOISE = 4.0  # standard errors of the recent mean that a change must exceed
HORIZON = 3  # a normal value forgets after this many times BASELINE values
CEILING = 0.9  # truncation rate above which few responses end by themselves
SMALL_BUDGET = 0.5  # truncation rate at a run's start; above it the budget is small by design
LEAP = 0.35  # rise of the truncation rate within WINDOW steps that no healthy run has shown
LOST = 0.25  # accuracy below this share of its normal value is lost
MEASURED = ("data.train", "environment", "objective", "sampling", "teacher")  # by the metrics


@dataclass(frozen=True)
class Detector:
    """One metric that a collapse moves."""

    metric: str
    worse: Literal["higher", "lower"]
    absolute: float  # least change that counts, in the metric's unit
    kind: Literal["drift", "cut", "breaks"] = "drift"  # "cut" and "breaks" together are damage
    relative: float = 0.0  # least change as a share of the normal value; the larger one holds
    rare: bool = False  # not written in every step: one value is enough
    cut_rates: tuple[str, ...] = ()  # the first that is written: the share of responses not in it
    counts_cut: bool = False  # they are in its mean, as 0


TRUNCATION = "truncation"
ACCURACY = "accuracy"
_CUT, _EPISODES_CUT = "rollout/truncation_rate", "rollout/episode_truncation_rate"
DETECTORS: dict[str, Detector] = {
    TRUNCATION: Detector(_CUT, "higher", 0.1, "cut"),
    **{
        f"{TRUNCATION}_{turns}": Detector(f"{_CUT}_{turns}", "higher", 0.1, "cut")
        for turns in turn_parts(sys.maxsize)
    },
    "repetition": Detector("tokens/repetitive_share", "higher", 0.1, "breaks"),
    "loop_advantage": Detector("advantage/abs_share_repetitive", "higher", 0.05, "breaks"),
    "actions": Detector("rollout/repeated_turn_rate", "higher", 0.15, "breaks"),
    ACCURACY: Detector(
        "rollout/accuracy_finished", "lower", 0.1, "breaks", cut_rates=(_EPISODES_CUT, _CUT)
    ),
    "teacher": Detector("kl/teacher", "higher", 0.05, "breaks", relative=0.5),
    "stop": Detector(
        "stop/student_mass", "lower", 0.2, "breaks", rare=True, cut_rates=(_CUT,), counts_cut=True
    ),
    "length": Detector("rollout/response_length_mean", "higher", 0.0, relative=0.25),
    "overlap": Detector("overlap/student_mass", "lower", 0.1, rare=True),
}


@dataclass(frozen=True)
class Series:
    """What is remembered of one detector's metric. A value's worth is the share of the responses
    that are in its mean."""

    recent: tuple[float, ...] = ()  # the last values, oldest first; at most WINDOW
    worth: tuple[float, ...] = ()  # of the last values
    learnt: float = 0.0  # sum of the worths that `normal` has learnt from, at most HORIZON*BASELINE
    start: float = 0.0  # mean of the first BASELINE values
    normal: float = 0.0  # running mean
    variance: float = 0.0  # squared distance of a value of worth 1 from it, on average


@dataclass(frozen=True)
class Symptom:
    """A detector whose metric is beyond its bound."""

    name: str  # a key of DETECTORS
    recent: float
    normal: float
    bound: float


class Seen(NamedTuple):
    """The watched metrics after a step."""

    watched: dict[str, Series]
    symptoms: list[Symptom]
    damaged: bool  # the symptoms are those of a collapse, and not of growth


def watch(watched: Mapping[str, Series], values: Mapping[str, float | None]) -> Seen:
    """Compare one step's metrics with their normal values, then learn from them.

    Nothing is learnt in a step with damage or with a symptom that breaks, so what lasts does not
    become normal. A metric that is absent or undefined leaves its series as it was.
    """
    found = _by_detector(values)
    after = dict(watched)
    for name, (value, worth) in found.items():
        series, size = after.get(name, Series()), _window(name)
        worths = (*series.worth, worth)[-size:]
        after[name] = replace(series, recent=(*series.recent, value)[-size:], worth=worths)
    symptoms = _symptoms(after)
    damaged = _is_damage(symptoms, after)
    if not damaged and all(DETECTORS[symptom.name].kind != "breaks" for symptom in symptoms):
        after |= {name: _learn(name, after[name], *each) for name, each in found.items()}
    return Seen(after, symptoms, damaged)


def starts_anew(event: Mapping[str, Any]) -> bool:
    """Whether an event of metrics.jsonl changed what the metrics measure. Then no value of before
    is normal."""
    changes = event.get("changes")
    if event["event"] != CHANGED_EVENT or not isinstance(changes, Mapping):
        return False
    keys = [str(key).removeprefix("contents of ") for key in cast("Mapping[str, Any]", changes)]
    return any(key.startswith(MEASURED) for key in keys)


def _by_detector(values: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
    """The finite values of the detectors' metrics, and the share of responses behind each."""
    found: dict[str, tuple[float, float]] = {}
    for name, detector in DETECTORS.items():
        value = values.get(detector.metric)
        rates = (values.get(rate) for rate in detector.cut_rates)
        worth = 1.0 - next((rate for rate in rates if rate is not None), 0.0)
        if value is not None and math.isfinite(value) and worth > 0:
            found[name] = value / worth if detector.counts_cut else value, worth
    return found


def _symptoms(watched: Mapping[str, Series]) -> list[Symptom]:
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
        if len(series.worth) < _window(name) or series.learnt < wanted:
            continue
        worth, pairs = math.fsum(series.worth), zip(series.recent, series.worth, strict=True)
        recent = math.fsum(value * share for value, share in pairs) / worth
        noise = NOISE * math.sqrt(series.variance / worth)
        change = max(detector.absolute, detector.relative * abs(series.normal), noise)
        bound = series.normal + (change if detector.worse == "higher" else -change)
        if detector.kind == "cut" and series.start <= SMALL_BUDGET:
            bound = min(bound, CEILING)
        if recent > bound if detector.worse == "higher" else recent < bound:
            found.append(Symptom(name, recent, series.normal, bound))
    return found


def _is_damage(found: Sequence[Symptom], watched: Mapping[str, Series]) -> bool:
    cut = [symptom for symptom in found if DETECTORS[symptom.name].kind == "cut"]
    broken = [symptom for symptom in found if DETECTORS[symptom.name].kind == "breaks"]
    return bool(
        (cut and broken)
        or any(_is_cut_off(symptom.recent, watched[symptom.name]) for symptom in cut)
        or any(each.name == ACCURACY and each.recent < LOST * each.normal for each in broken)
    )


def _is_cut_off(recent: float, series: Series) -> bool:
    """Whether truncation is near its ceiling or leaps there; not where the budget is small."""
    rise = (sum(series.recent[-2:]) - sum(series.recent[:2])) / 2
    return series.start <= SMALL_BUDGET and (recent > CEILING or rise > LEAP)


def _learn(name: str, series: Series, value: float, worth: float) -> Series:
    """The series with a value in its normal value, which is the plain mean of the first
    HORIZON * BASELINE values and then forgets.

    After a return to a checkpoint nothing is learnt until the recent mean can judge the run again.
    """
    if len(series.recent) < min(_window(name), series.learnt):
        return series
    learnt = min(series.learnt + worth, HORIZON * BASELINE)
    share, change = worth / learnt, value - series.normal
    normal = series.normal + share * change
    return replace(
        series,
        learnt=learnt,
        start=normal if learnt <= BASELINE else series.start,
        normal=normal,
        variance=(1 - share) * (series.variance + share * worth * change * change),
    )


def _window(name: str) -> int:
    return 1 if DETECTORS[name].rare else WINDOW
