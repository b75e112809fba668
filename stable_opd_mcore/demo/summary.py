"""The numbers of the demo's arms: a summary of each, and their table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from stable_opd_mcore.demo.recipe import Job
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.outcomes import Outcome, outcome
from stable_opd_mcore.monitoring.sinks import read_metrics

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
    arm: str
    seed: int
    outcome: Outcome

    def record(self) -> dict[str, Any]:
        """The arm's record in summary.json: flat, with the names of the outcome's fields."""
        return {"arm": self.arm, "seed": self.seed} | asdict(self.outcome)


def summarise(job: Job) -> ArmSummary:
    assert job.arm is not None
    rows = read_metrics(RunDirectory(job.directory).metrics)
    return ArmSummary(job.arm, job.seed, outcome(rows))


def summary_table(arms: Sequence[ArmSummary]) -> Table:
    """One row per arm and seed, at most 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("arm", no_wrap=True)
    for heading in ("seed", *_COLUMNS):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in arms:
        numbers = (getattr(arm.outcome, name) for name in _COLUMNS.values())
        table.add_row(arm.arm, str(arm.seed), *(f"{number:.2f}" for number in numbers))
    return table
