"""The runs that a report shows, and what each has written so far.

Files of a run may come from anywhere: they are read as plain values, and a malformed one is named.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from stable_opd_mcore.commands.report.figures import Row
from stable_opd_mcore.config.changes import by_dotted_key
from stable_opd_mcore.config.load import unescaped
from stable_opd_mcore.config.source_objectives import objective_names
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.host.printable_text import printable, shortest_end
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import read_run

RESULT_FILES = "evaluation/*/results.json"  # a run's evaluated models
SEEDS = re.compile(r"train\.seed|data\.\w+\.options\.seed")  # differ between an arm's runs
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if installed


@dataclass(frozen=True)
class ReportRun:
    """A run; those with one label (the seeds of an arm) share a colour and a legend entry."""

    directory: Path
    label: str
    name: str = ""  # an end of the directory's path that no other run of the report has


@dataclass(frozen=True)
class WrittenRun:
    run: ReportRun
    rows: list[Row]
    events: list[dict[str, Any]]
    settings: dict[str, str]  # dotted key -> value
    results: dict[str, dict[str, dict[str, float]]]  # evaluated model -> benchmark -> its numbers


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
            chosen.setdefault(path, ReportRun(directory, given.label))
    named: list[ReportRun] = []
    for path, run in chosen.items():
        name = printable(shortest_end(path, chosen))
        named.append(ReportRun(run.directory, printable(run.label) or name, name))
    return named


def read_written(run: ReportRun) -> WrittenRun:
    """What a run's files hold; a UserError names one that is missing or malformed."""
    results = {path.parent.name: _results(path) for path in run.directory.glob(RESULT_FILES)}
    rows, events = read_run(RunDirectory(run.directory).metrics)
    return WrittenRun(run, rows, events, read_settings(run.directory), results)


def evaluated_runs(evaluations: Iterable[Path]) -> list[WrittenRun]:
    """The runs of these evaluations (`<run>/evaluation/<model>`) with their settings and results.

    Models of no run share one directory in place of a run's, without settings and metrics.
    """
    results: dict[Path, dict[str, dict[str, dict[str, float]]]] = {}
    for each in evaluations:
        directory = Path(os.path.realpath(each))
        found = _results(directory / "results.json")
        results.setdefault(directory.parent.parent, {})[directory.name] = found
    names = {path: printable(shortest_end(path, results)) for path in results}
    return [
        WrittenRun(ReportRun(path, names[path], names[path]), [], [], read_settings(path), found)
        for path, found in results.items()
    ]


def seeds_together(runs: Sequence[WrittenRun]) -> list[WrittenRun]:
    """The runs; those that differ only in their seed share a label.

    The label is what their names have in common, or all their names if other runs would have the
    same label. A label that was given stays.
    """
    arms: dict[frozenset[tuple[str, str]], list[WrittenRun]] = {}
    for one in runs:
        if one.run.label == one.run.name:
            same = frozenset(i for i in one.settings.items() if not SEEDS.fullmatch(i[0]))
            arms.setdefault(same, []).append(one)
    names = {
        one.run: tuple(each.run.name for each in arm)
        for arm in arms.values()
        if len(arm) == len({frozenset(one.settings.items()) for one in arm}) > 1
        for one in arm
    }
    taken = Counter(_in_common(arm) for arm in set(names.values()))
    taken.update(one.run.label for one in runs if one.run not in names)
    labels = {
        run: common if taken[common := _in_common(arm)] == 1 else " + ".join(arm)
        for run, arm in names.items()
    }
    return [
        replace(one, run=replace(one.run, label=labels.get(one.run, one.run.label))) for one in runs
    ]


def _in_common(names: Sequence[str]) -> str:
    """The beginning that the names share, without "seed"; else the end that they share."""
    shared = os.path.commonprefix  # compares single characters
    begin = re.sub(r"[_./-]*(seed\d*)?[_./-]*$", "", shared(names))
    end = shared([name[::-1] for name in names])[::-1].lstrip("_./-")
    return begin or end or names[0]


def read_settings(directory: Path) -> dict[str, str]:
    """A run's settings by their dotted keys, without those of `run`; empty if it wrote none.

    Raises:
        UserError: config.resolved.yaml is not a YAML mapping, or holds aliases.
    """
    path = RunDirectory(directory).resolved
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        # A run writes no aliases. Nested ones would grow to any size when they are shown.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, LOADER)):
            raise ValueError("it holds aliases (*name), which no run writes")
        values = unescaped(yaml.load(text, LOADER))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # several lines, with a caret below one
        raise UserError(
            f"{path}: not readable as YAML: {reason}; restore the run's file"
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: a {type(values).__name__}, not a mapping of settings; restore the run's file"
        )
    flat = by_dotted_key(values)
    if "objective.name" in flat:
        flat["objective.name"] = objective_names(flat["objective.name"], flat.get("data.train"))
    return {key: str(value) for key, value in flat.items() if not key.startswith("run.")}


def whole_number(settings: dict[str, str], key: str) -> int | None:
    """A setting that is a number; None if it is missing or not a number."""
    text = settings.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def _results(path: Path) -> dict[str, dict[str, float]]:
    """Benchmark -> its finite numbers."""
    values = read_json_object(path, remedy="delete it").get("benchmarks")
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise UserError(
            f"{path}: no mapping of numbers for each benchmark; delete it, and evaluate again"
        )
    return {
        name: {
            key: float(number)
            for key, number in numbers.items()
            if type(number) in (int, float) and abs(number) <= sys.float_info.max
        }
        for name, numbers in values.items()
    }


def _runs_below(directory: Path) -> list[Path]:
    if RunDirectory(directory).metrics.exists() or not directory.is_dir():
        return [directory]
    found = sorted(path.parent for path in directory.rglob(RunDirectory(directory).metrics.name))
    return found or [directory]
