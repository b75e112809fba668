"""The report's tables: outcomes of the runs, benchmark results, settings that differ.

Text from a run's files is untrusted: it becomes plain strings with visible control characters, and
the template escapes them. Not here: the numbers of a run (outcomes.py), the curves (figures.py).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stable_opd_mcore.config.guard import GuardConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.printable_text import beginning, printable
from stable_opd_mcore.monitoring.figures import WINDOW, Row
from stable_opd_mcore.monitoring.onset import DETECTORS
from stable_opd_mcore.monitoring.outcomes import defined, first_damage, outcome

CONFIG_FILE = "config.resolved.yaml"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is
EVALUATION_FILES = "evaluation/*/results.json"  # of a run's evaluated models
MISSING = "\N{EN DASH}"
MAX_CELL = 200  # characters of a cell; of a longer one the beginning is kept
MAX_ROWS = 100  # of a table


@dataclass
class Table:
    """A table of texts. Rows beyond MAX_ROWS are counted and not kept."""

    columns: list[str]
    texts: int = 1  # number of leading columns that hold words
    rows: list[list[str]] = field(default_factory=list)
    left_out: int = 0

    def add(self, cells: Sequence[Any]) -> None:
        """One more row; numbers and texts become short printable texts."""
        if len(self.rows) < MAX_ROWS:
            self.rows.append([_cell(cell) for cell in cells])
        else:
            self.left_out += 1


def outcome_table(runs: Sequence[tuple[str, Path, Sequence[Row]]]) -> Table:
    """One row per run (its name, directory, rows): its outcome, and the first damage.

    The gap recovered is (accuracy at end - at start) / (teacher's - at start), docs/method.md §5,
    if the run's settings hold the teacher's accuracy (`evaluation.teacher_accuracy`).
    """
    return _table([_outcome_cells(*run) for run in runs])


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Records of the same keys as rows; the first two columns hold words."""
    table = Table(list(records[0]), texts=2)
    for record in records:
        table.add(list(record.values()))
    return table


def _outcome_cells(name: str, directory: Path, rows: Sequence[Row]) -> dict[str, Any]:
    found = outcome(rows)
    start, end = found.initial_accuracy, found.final_accuracy
    distance = _teacher_accuracy(directory) - start
    return {
        "run": name,
        "first damage": verdict(rows),
        "steps": f"{rows[-1]['step']:,}",
        "accuracy at start": start,
        "accuracy at peak": found.peak_accuracy,
        "accuracy at end": end,
        "greedy at end": found.greedy_final_accuracy,
        "gap recovered": (end - start) / distance if distance else math.nan,
        "truncated at worst": found.max_truncation_rate,
        "truncated at end": found.final_truncation_rate,
        "repetitive at worst": found.max_repetition_rate,
        "repetitive at end": found.final_repetition_rate,
        "length at end": _mean(defined(rows, "rollout/response_length_mean")[-WINDOW:]),
        "tokens per second": _mean(defined(rows, "throughput/tokens_per_second")),
    }


def verdict(rows: Sequence[Row]) -> str:
    """The first damage by a collapse in words; MISSING where there are too few rollouts."""
    found = first_damage(rows)
    if found is None:
        watched = defined(rows, "rollout/truncation_rate")
        return "none" if len(watched) > GuardConfig().baseline else MISSING
    step, symptoms = found
    return f"step {step:,}: " + ", ".join(DETECTORS[symptom.name].metric for symptom in symptoms)


def config_differences(runs: Sequence[tuple[str, Path]]) -> Table | None:
    """Settings that differ between labels; None if none differs.

    Runs with one label (seeds of one arm) share a column, which lists all their values.

    Raises:
        UserError: a config.resolved.yaml is no YAML mapping; the message names the file.
    """
    labels = list(dict.fromkeys(label for label, _ in runs))
    settings: dict[str, list[dict[str, str]]] = {label: [] for label in labels}
    for label, directory in runs:
        settings[label].append(_flat_config(directory / CONFIG_FILE))
    table = Table(["setting", *(beginning(label, MAX_CELL) for label in labels)])
    for key in sorted({key for group in settings.values() for flat in group for key in flat}):
        cells = [
            ", ".join(dict.fromkeys(flat.get(key, MISSING) for flat in settings[label]))
            for label in labels
        ]
        if len(set(cells)) > 1:
            table.add([key, *cells])
    return table if table.rows else None


def benchmark_table(runs: Sequence[tuple[str, Path]]) -> Table | None:
    """What `stable-opd evaluate` wrote: a row per benchmark and run; None if no run has results.

    Raises:
        UserError: a results.json has no mapping of benchmarks; the message names the file.
    """
    results = [
        (f"{name}, {path.parent.name}", _evaluation(path))
        for name, directory in runs
        for path in sorted(directory.glob(EVALUATION_FILES))
    ]
    records = [
        {
            "benchmark": benchmark,
            "run": name,
            "problems": _count(result.get("num_problems")),
            "k": _count(result.get("num_samples")),
            "accuracy": result.get("accuracy"),
            "95 % interval": _interval(result),
            "truncated": result.get("truncation_rate"),
            "repetitive": result.get("repetition_rate"),
            "tokens": _count(result.get("response_length_mean")),
        }
        for benchmark in dict.fromkeys(name for _, found in results for name in found)
        for name, found in results
        if (result := found.get(benchmark)) is not None
    ]
    return _table(records) if records else None


def _interval(result: Mapping[str, float]) -> str | None:
    if not {"accuracy_low", "accuracy_high"} <= result.keys():
        return None
    return f"{result['accuracy_low']:.3f} to {result['accuracy_high']:.3f}"


def tiles(directory: Path, rows: Sequence[Row]) -> list[dict[str, str]]:
    """The state of one run in a few numbers: each with a name, a value and a note, in order."""
    total, found = planned_steps(directory), outcome(rows)
    held_out = "Held-out accuracy" if defined(rows, "eval/accuracy") else "Rollout accuracy"
    accuracy = f"from {_cell(found.initial_accuracy)}, peak {_cell(found.peak_accuracy)}"
    length = _mean(defined(rows, "rollout/response_length_mean")[-WINDOW:])
    speed = _mean(defined(rows, "throughput/tokens_per_second"))
    shown = [
        ("Step", f"{rows[-1]['step']:,}", "" if total is None else f"of {total:,}"),
        ("First damage", *_halves(verdict(rows))),
        (held_out, found.final_accuracy, accuracy),
        ("Truncated", found.final_truncation_rate, f"at worst {found.max_truncation_rate:.3f}"),
        ("Repetitive", found.final_repetition_rate, f"at worst {found.max_repetition_rate:.3f}"),
        ("Length", length, "tokens a response"),
        ("Throughput", speed, "tokens a second"),
    ]
    return [
        {"name": name, "value": _cell(value), "note": note}
        for name, value, note in shown
        if _cell(value) != MISSING
    ]


def planned_steps(directory: Path) -> int | None:
    """The run's last step by its settings; None where they are not written or readable."""
    return _whole_setting(directory, "train.steps")


def length_budget(directory: Path) -> int | None:
    """`sampling.max_new_tokens` of the run; None where it is not written or readable."""
    return _whole_setting(directory, "sampling.max_new_tokens")


def described(directory: Path) -> str:
    """One line about a run: its objective, its student and teacher, its data."""
    config = _flat_config(directory / CONFIG_FILE)
    if not config:
        return "on-policy distillation"
    terms = [config.get("objective.name", MISSING)]
    for key, name in (("kl.beta", "\u03b2"), ("mixture.lambda", "\u03bb")):
        if config.get(key, "0.0") not in ("0", "0.0"):
            terms.append(f"{name} = {config[key]}")
    parts = [", ".join(terms)]
    for key in ("student.path", "teacher.path", "data.train.path"):
        if config.get(key, "None") != "None":
            parts.append(f"{key.partition('.')[0]} {config[key]}")
    return " \N{MIDDLE DOT} ".join(parts)


def _whole_setting(directory: Path, key: str) -> int | None:
    try:
        text = _flat_config(directory / CONFIG_FILE).get(key, "")
    except (UserError, OSError):
        return None
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def _halves(text: str) -> tuple[str, str]:
    """The value of a tile and its note: what stands before the colon and after it."""
    value, _, note = text.partition(": ")
    return value, note


def _teacher_accuracy(directory: Path) -> float:
    """NaN where the run's settings have none."""
    stated = _flat_config(directory / CONFIG_FILE).get("evaluation.teacher_accuracy", "")
    try:
        return float(stated)
    except ValueError:  # "None", or no number
        return math.nan


def _mean(numbers: Sequence[float]) -> str:
    return _count(sum(numbers) / len(numbers)) if numbers else MISSING


def _cell(value: Any) -> str:
    if value is None or value != value:
        return MISSING
    return (
        f"{value:.3f}" if isinstance(value, float) else beginning(printable(str(value)), MAX_CELL)
    )


def _count(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else MISSING


def _evaluation(path: Path) -> dict[str, dict[str, float]]:
    """Benchmark -> its finite numbers."""
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from error
    values = record.get("benchmarks") if isinstance(record, dict) else None
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise UserError(f"{path}: expected one mapping of numbers for each benchmark")
    return {
        name: {
            key: float(number)
            for key, number in numbers.items()
            if type(number) in (int, float) and abs(number) <= sys.float_info.max
        }
        for name, numbers in values.items()
    }


def _flat_config(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        # A run writes no aliases. Nested ones would grow to any size when they are shown.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, LOADER)):
            raise ValueError("it holds aliases (*name), which no run writes")
        values = yaml.load(text, LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # of several lines, with a caret below one
        raise UserError(f"{path}: not readable as YAML: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    flat = _flatten(values)
    return {key: text for key, text in flat.items() if not key.startswith("run.")}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = printable(str(value))
    return flat
