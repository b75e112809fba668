"""What came out of a run, by its metrics: accuracy, truncation, repetition, the first damage."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.commands.report.figures import WINDOW, Row
from stable_opd_mcore.train.oversight.onset import Series, Symptom, starts_anew, watch


@dataclass(frozen=True)
class Outcome:
    """A run in numbers; NaN where it has no value.

    Accuracies are those of held-out evaluations (`greedy_`: greedy ones), or of rollouts in a run
    without evaluations. Rates are 5-step means over rollouts, or single evaluations in a run
    without rollouts.
    """

    initial_accuracy: float
    peak_accuracy: float
    lowest_accuracy_after_peak: float
    final_accuracy: float
    max_truncation_rate: float
    final_truncation_rate: float
    max_repetition_rate: float
    final_repetition_rate: float
    greedy_initial_accuracy: float
    greedy_final_accuracy: float


def outcome(rows: Sequence[Row]) -> Outcome:
    accuracy = defined(rows, "eval/accuracy") or defined(rows, "rollout/accuracy") or [math.nan]
    greedy = defined(rows, "eval_greedy/accuracy") or [math.nan]
    truncation, repetition = _rates(rows, "truncation_rate"), _rates(rows, "repetition_rate")
    peak = accuracy.index(max(accuracy))
    return Outcome(
        initial_accuracy=accuracy[0],
        peak_accuracy=accuracy[peak],
        lowest_accuracy_after_peak=min(accuracy[peak:]),
        final_accuracy=accuracy[-1],
        max_truncation_rate=max(truncation),
        final_truncation_rate=truncation[-1],
        max_repetition_rate=max(repetition),
        final_repetition_rate=repetition[-1],
        greedy_initial_accuracy=greedy[0],
        greedy_final_accuracy=greedy[-1],
    )


def _rates(rows: Sequence[Row], rate: str) -> list[float]:
    means = window_means(defined(rows, f"rollout/{rate}"))
    return means or defined(rows, f"eval/{rate}") or [math.nan]


def defined(rows: Sequence[Row], key: str) -> list[float]:
    """The defined values of a metric, in order."""
    return [row[key] for row in rows if row.get(key) is not None]


def window_means(numbers: Sequence[float], window: int = WINDOW) -> list[float]:
    """Means of every `window` consecutive numbers; fewer give one mean, none give nothing."""
    window = min(window, len(numbers))
    ends = range(window, len(numbers) + 1) if numbers else ()
    return [sum(numbers[end - window : end]) / window for end in ends]


def first_damage(
    rows: Sequence[Row], events: Sequence[Mapping[str, Any]] = ()
) -> tuple[int, list[Symptom]] | None:
    """The first step after which the guard finds damage (docs/guard.md), with its symptoms."""
    watched: dict[str, Series] = {}
    anew = {event["after_step"] for event in events if starts_anew(event)}
    for row in rows:
        watched, found, damaged = watch({} if row["step"] - 1 in anew else watched, row)
        if damaged:
            return row["step"], found
    return None
