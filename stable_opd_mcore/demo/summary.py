"""The summary of one arm of the demo, from its metrics.jsonl."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stable_opd_mcore.demo.recipe import Job
from stable_opd_mcore.monitoring.outcomes import Outcome, outcome
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class ArmSummary:
    """An arm with its outcome."""

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
