"""The numbers of the demo's arms: a summary of each, and their table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from stable_opd_mcore.commands.demo.recipe import Job
from stable_opd_mcore.commands.report.figures import Row
from stable_opd_mcore.commands.report.outcomes import Outcome, defined, outcome, window_means
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import read_metrics

RING = "ring"  # the name of the source with an environment
_COLUMNS = {  # heading -> key of the arm's record
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
_AGENT_COLUMNS = {
    "math\nstart": "initial_accuracy",
    "math\npeak": "peak_accuracy",
    "math\nend": "final_accuracy",
    "ring\nstart": "ring_initial_success",
    "ring\npeak": "ring_peak_success",
    "ring\nend": "ring_final_success",
    "turns\nend": "ring_final_turns",
    "cut\nmax": "ring_max_cut_turns",
    "cut\nend": "ring_final_cut_turns",
    "KL\n2": "ring_final_kl_turn_2",
    "KL\n5+": "ring_final_kl_turn_5_8",
}
_LATER_TURNS = ("turn_2", "turn_3_4", "turn_5_8")


@dataclass(frozen=True)
class ArmSummary:
    arm: str
    seed: int
    outcome: Outcome
    ring: Mapping[str, float] = field(default_factory=dict)  # of its episodes, if it has any

    def record(self) -> dict[str, Any]:
        """The arm's record in summary.json: flat, with the names of the outcome's fields."""
        return {"arm": self.arm, "seed": self.seed} | asdict(self.outcome) | dict(self.ring)


def summarise(job: Job) -> ArmSummary:
    assert job.arm is not None
    rows = read_metrics(RunDirectory(job.directory).metrics)
    has_ring = any(f"source/{RING}/accuracy" in row for row in rows)
    return ArmSummary(job.arm, job.seed, outcome(rows), _ring(rows) if has_ring else {})


def _ring(rows: Sequence[Row]) -> dict[str, float]:
    """Success, turns, truncated turns and KL in later turns of the ring's episodes, 5-step means.

    The KL is over the last five steps that have such turns.
    """
    success = window_means(defined(rows, f"source/{RING}/accuracy"))
    cut = window_means(defined(rows, f"source/{RING}/truncation_rate"))
    turns = window_means(defined(rows, "rollout/turns_mean"))
    kl = {part: window_means(defined(rows, f"kl/teacher_{part}")) for part in _LATER_TURNS}
    return {
        "ring_initial_success": success[0],
        "ring_peak_success": max(success),
        "ring_final_success": success[-1],
        "ring_final_turns": turns[-1],
        "ring_max_cut_turns": max(cut),
        "ring_final_cut_turns": cut[-1],
        **{f"ring_final_kl_{part}": (means or [math.nan])[-1] for part, means in kl.items()},
    }


def summary_table(arms: Sequence[ArmSummary]) -> Table:
    """One row per arm and seed, at most 80 columns wide."""
    columns = _AGENT_COLUMNS if any(arm.ring for arm in arms) else _COLUMNS
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("arm", no_wrap=True)
    for heading in ("seed", *columns):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in arms:
        numbers = (arm.record()[name] for name in columns.values())
        table.add_row(arm.arm, str(arm.seed), *(f"{number:.2f}" for number in numbers))
    return table
