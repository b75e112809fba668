"""The runs that a report or a live view shows: from directories and folders of runs, with names.

Not here: what the runs have written (sinks.py), the page (report.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.monitoring.sinks import METRICS_FILE


@dataclass(frozen=True)
class ReportRun:
    """A run with its label and section in the report.

    Runs of one section share its figures. Runs with one label (the seeds of an arm) share a colour
    and, in each section, a legend entry. The name, which tables and the reader show, is an end of
    the directory's path that no other run of the report has.
    """

    directory: Path
    label: str
    section: str = ""
    name: str = ""


def named_runs(runs: Sequence[str | Path | ReportRun]) -> list[ReportRun]:
    """The runs with their names. A directory's label is its name.

    A directory without metrics.jsonl stands for all runs below it; one without any for a run that
    has not started. A directory that is named twice is shown once.
    """
    chosen: dict[Path, ReportRun] = {}
    for run in runs:
        given = run if isinstance(run, ReportRun) else ReportRun(Path(run), "")
        below = [given.directory] if given.label else _runs_below(given.directory)
        for directory in below:
            path = Path(os.path.realpath(directory))  # Path.resolve raises for a loop of links
            chosen.setdefault(path, ReportRun(directory, given.label, given.section))
    named: list[ReportRun] = []
    for path, run in chosen.items():
        name = printable(_shortest(path, list(chosen)))
        label = printable(run.label) or name
        named.append(ReportRun(run.directory, label, printable(run.section), name))
    return named


def _runs_below(directory: Path) -> list[Path]:
    if (directory / METRICS_FILE).exists() or not directory.is_dir():
        return [directory]
    found = sorted(path.parent for path in directory.rglob(METRICS_FILE))
    return found or [directory]


def _shortest(path: Path, paths: Sequence[Path]) -> str:
    """The shortest end of `path` that no other path has."""
    ends: Iterator[tuple[str, ...]] = (path.parts[-n:] for n in range(1, len(path.parts) + 1))
    return next(
        "/".join(end)
        for end in ends
        if sum(other.parts[-len(end) :] == end for other in paths) == 1
    )
