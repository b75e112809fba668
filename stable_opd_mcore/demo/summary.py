"""The summary of one arm of the demo, from its metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from stable_opd_mcore.demo.recipe import Job
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, read_metrics

WINDOW = 5  # steps in the mean of a rate


@dataclass(frozen=True)
class ArmSummary:
    """Accuracies are those of held-out evaluations at temperature 1 (`greedy_`: greedy).

    Rates are 5-step means over rollouts, or single evaluations in an arm without rollouts.
    """

    act: str
    arm: str
    seed: int
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


def summarise(job: Job) -> ArmSummary:
    """The summary of a finished arm."""
    assert job.arm is not None and job.act is not None
    rows = read_metrics(job.directory / METRICS_FILE)

    def series(key: str) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    accuracy = series("eval/accuracy")
    greedy = series("eval_greedy/accuracy")
    peak = accuracy.index(max(accuracy))
    truncation, repetition = (
        _means(series(f"rollout/{rate}")) or series(f"eval/{rate}")
        for rate in ("truncation_rate", "repetition_rate")
    )
    return ArmSummary(
        act=job.act,
        arm=job.arm,
        seed=job.seed,
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


def _means(values: list[float]) -> list[float]:
    """Means of every WINDOW consecutive values."""
    return [sum(values[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(values) + 1)]
