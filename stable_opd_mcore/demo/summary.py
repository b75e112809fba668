"""The numbers of the demo's arms: a summary of each, the tables of an act and of the ablation.

Not here: the runs (recipe.py, run.py) and their curves (monitoring/report.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from stable_opd_mcore.demo.recipe import Job
from stable_opd_mcore.evaluation.estimates import bootstrap_interval
from stable_opd_mcore.monitoring.outcomes import Outcome, outcome
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, read_metrics

_COLUMNS = {  # heading -> field of the outcome
    "start": "initial_accuracy",
    "peak": "peak_accuracy",
    "low": "lowest_accuracy_after_peak",
    "end": "final_accuracy",
    "greedy": "greedy_final_accuracy",
    "trunc\nmax": "max_truncation_rate",
    "trunc\nend": "final_truncation_rate",
    "rep\nmax": "max_repetition_rate",
    "rep\nend": "final_repetition_rate",
}


@dataclass(frozen=True)
class ArmSummary:
    """An arm of one seed with its outcome."""

    act: str
    arm: str
    seed: int
    outcome: Outcome

    def record(self) -> dict[str, Any]:
        """The arm as it stands in summary.json: flat, with the names of the outcome's fields."""
        names = {"act": self.act, "arm": self.arm, "seed": self.seed}
        return names | asdict(self.outcome)


def summarise(job: Job) -> ArmSummary:
    """The summary of a finished arm."""
    assert job.arm is not None and job.act is not None
    rows = read_metrics(job.directory / METRICS_FILE)
    return ArmSummary(job.act, job.arm, job.seed, outcome(rows))


def summary_table(act: str, arms: Sequence[ArmSummary]) -> Table:
    """One row per arm and seed, at most 80 columns wide."""
    table = Table(
        title=act, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("arm", no_wrap=True)
    for heading in ("seed", *_COLUMNS):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in arms:
        numbers = (getattr(arm.outcome, name) for name in _COLUMNS.values())
        table.add_row(arm.arm, str(arm.seed), *(f"{number:.2f}" for number in numbers))
    return table


def ablation_markdown(arms: Sequence[ArmSummary]) -> str:
    """Every arm over its seeds: means with 95 % bootstrap intervals (10,000 resamples of seeds).

    "minus start" is the difference to the student at the start of the same seed, "seeds above
    start" those whose sampled and greedy accuracy both end above it.
    """
    lines = [
        "| arm | sampled, end | minus start | greedy, end | minus start | seeds above start "
        "| truncation max |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(arm.arm for arm in arms):
        runs = [arm.outcome for arm in arms if arm.arm == name]
        sampled = [run.final_accuracy - run.initial_accuracy for run in runs]
        greedy = [run.greedy_final_accuracy - run.greedy_initial_accuracy for run in runs]
        cells = [
            f"`{name}`",
            _estimate([run.final_accuracy for run in runs]),
            _estimate(sampled, sign="+"),
            _estimate([run.greedy_final_accuracy for run in runs]),
            _estimate(greedy, sign="+"),
            f"{sum(min(gains) > 0 for gains in zip(sampled, greedy, strict=True))} of {len(runs)}",
            f"{sum(run.max_truncation_rate for run in runs) / len(runs):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _estimate(values: Sequence[float], sign: str = "") -> str:
    low, high = bootstrap_interval([values])
    mean = sum(values) / len(values)
    return f"{mean:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"
