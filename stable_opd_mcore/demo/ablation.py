"""The ablation: every arm's accuracy over seeds, with bootstrap intervals, as a table.

Not here: the runs (recipe.py, run.py) and their curves (monitoring/report.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stable_opd_mcore.demo.summary import ArmSummary
from stable_opd_mcore.monitoring.outcomes import Outcome

RESAMPLES = 10_000
COVERAGE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its percentile bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def signed(self) -> str:
        """With a sign before each number, for a difference."""
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class AblationRow:
    """One arm over all seeds. Accuracies are of held-out problems; rates as in Outcome."""

    arm: str
    seeds: int
    sampled: Estimate  # accuracy at the end, temperature 1
    sampled_gain: Estimate  # minus the student's at the start, of the same seed
    greedy: Estimate
    greedy_gain: Estimate
    seeds_above_start: int  # sampled and greedy accuracy both above the start
    max_truncation_rate: float  # mean over seeds


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of `values` and the percentile interval of the means of RESAMPLES resamples.

    Each resample draws len(values) of the values with replacement. The interval leaves out
    (1 - COVERAGE) / 2 of the resampled means on each side. Equal arguments give equal results.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a bootstrap needs at least one value")
    rng, count = random.Random(seed), len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES))
    outside = round(RESAMPLES * (1 - COVERAGE) / 2)
    return Estimate(sum(values) / count, means[outside], means[-1 - outside])


def ablation_rows(arms: Sequence[ArmSummary]) -> list[AblationRow]:
    """One row for each arm, in the order of their first summaries."""
    return [
        _row(name, [arm.outcome for arm in arms if arm.arm == name])
        for name in dict.fromkeys(arm.arm for arm in arms)
    ]


def _row(name: str, runs: Sequence[Outcome]) -> AblationRow:
    sampled = [run.final_accuracy - run.initial_accuracy for run in runs]
    greedy = [run.greedy_final_accuracy - run.greedy_initial_accuracy for run in runs]
    return AblationRow(
        arm=name,
        seeds=len(runs),
        sampled=bootstrap([run.final_accuracy for run in runs]),
        sampled_gain=bootstrap(sampled),
        greedy=bootstrap([run.greedy_final_accuracy for run in runs]),
        greedy_gain=bootstrap(greedy),
        seeds_above_start=sum(min(gains) > 0 for gains in zip(sampled, greedy, strict=True)),
        max_truncation_rate=sum(run.max_truncation_rate for run in runs) / len(runs),
    )


def ablation_markdown(rows: Sequence[AblationRow]) -> str:
    """The table as Markdown."""
    lines = [
        "| arm | sampled, end | minus start | greedy, end | minus start | seeds above start "
        "| truncation max |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.arm}` | {row.sampled} | {row.sampled_gain.signed()} | {row.greedy} "
        f"| {row.greedy_gain.signed()} | {row.seeds_above_start} of {row.seeds} "
        f"| {row.max_truncation_rate:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
