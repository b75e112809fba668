"""The report's tables: outcomes of the runs, benchmark results, settings that differ.

Text from a run's files is untrusted: it becomes plain strings with visible control characters, and
the template escapes them. Not here: the curves (figures.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.printable_text import beginning, printable
from stable_opd_mcore.monitoring.figures import WINDOW, Row, trailing_mean

CONFIG_FILE = "config.resolved.yaml"
EVALUATION_FILES = "evaluation/*/results.json"  # of a run's evaluated models
MISSING = "\N{EN DASH}"

MAX_CELL = 200  # characters of a cell; of a longer one the beginning is kept

# {"columns": [str], "rows": [[str]], "texts": number of leading columns that hold words}; a
# shortened one also has "left_out", the number of rows that it lacks
Table = dict[str, Any]


def outcome_table(runs: Sequence[tuple[str, Path, Sequence[Row]]]) -> Table:
    """One row per run: accuracy at start, peak and end; highest and last truncation, repetition.

    The gap recovered is (accuracy at end - at start) / (teacher's - at start), docs/method.md §5,
    if the run's settings hold the teacher's accuracy (`evaluation.teacher_accuracy`).
    """
    columns = [
        "run",
        "directory",
        "steps",
        "accuracy at start",
        "accuracy at peak",
        "accuracy at end",
        "gap recovered",
        "truncated at worst",
        "truncated at end",
        "repetitive at worst",
        "repetitive at end",
        "length at end",
        "tokens per second",
    ]
    return {
        "columns": columns,
        "rows": [
            [label, printable(directory.name), *_outcome(rows, _teacher_accuracy(directory))]
            for label, directory, rows in runs
        ],
        "texts": 2,
    }


def table_of_records(records: Sequence[Mapping[str, Any]]) -> Table:
    """Any list of flat records (a summary.json's `arms`), columns in order of appearance."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_cell(record.get(key)) for key in columns] for record in records]
    words = [any(isinstance(record.get(key), str) for record in records) for key in columns]
    return {
        "columns": [column.replace("_", " ") for column in columns],
        "rows": rows,
        "texts": (*words, False).index(False),
    }


def shortened(table: Table | None, rows: int) -> Table | None:
    """The table with at most `rows` rows, and the beginning of long cells."""
    if table is None:
        return None
    return table | {
        "columns": [beginning(name, MAX_CELL) for name in table["columns"]],
        "rows": [[beginning(cell, MAX_CELL) for cell in row] for row in table["rows"][:rows]],
        "left_out": max(0, len(table["rows"]) - rows),
    }


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
    keys = sorted({key for group in settings.values() for flat in group for key in flat})
    rows = []
    for key in keys:
        cells = [
            ", ".join(dict.fromkeys(flat.get(key, MISSING) for flat in settings[label]))
            for label in labels
        ]
        if len(set(cells)) > 1:
            rows.append([key, *cells])
    return {"columns": ["setting", *labels], "rows": rows, "texts": 1} if rows else None


def benchmark_table(runs: Sequence[tuple[str, Path]]) -> Table | None:
    """What `stable-opd evaluate` wrote: a row per benchmark and run; None if no run has results.

    Raises:
        UserError: a results.json has no mapping of benchmarks; the message names the file.
    """
    results = [
        (f"{label}, {printable(path.parent.name)}", _evaluation(path))
        for label, directory in runs
        for path in sorted(directory.glob(EVALUATION_FILES))
    ]
    names = list(dict.fromkeys(name for _, values in results for name in values))
    rows = []
    for name in names:
        for label, values in results:
            if name not in values:
                continue
            result = values[name]
            low, high = result.get("accuracy_low"), result.get("accuracy_high")
            rows.append(
                [
                    printable(name),
                    label,
                    _count(result.get("num_problems")),
                    _count(result.get("num_samples")),
                    _cell(result.get("accuracy")),
                    MISSING if low is None or high is None else f"{_cell(low)} to {_cell(high)}",
                    _cell(result.get("truncation_rate")),
                    _cell(result.get("repetition_rate")),
                    _count(result.get("response_length_mean")),
                ]
            )
    columns = ["benchmark", "run", "problems", "k", "accuracy", "95 % interval"]
    columns += ["truncated", "repetitive", "tokens"]
    return {"columns": columns, "rows": rows, "texts": 2} if rows else None


def tiles(directory: Path, rows: Sequence[Row]) -> list[dict[str, str]]:
    """The state of one run in a few numbers: each with a name, a value and a note, in order."""
    total = planned_steps(directory)
    shown = [_tile("Step", f"{rows[-1]['step']:,}", "" if total is None else f"of {total:,}")]
    held_out = _defined(rows, "eval/accuracy")
    accuracy = held_out or _defined(rows, "rollout/accuracy")
    if accuracy:
        step, peak = max(accuracy, key=lambda pair: pair[1])
        name = "Held-out accuracy" if held_out else "Rollout accuracy"
        note = f"from {_cell(accuracy[0][1])}, peak {_cell(peak)} at step {step:,}"
        shown.append(_tile(name, _cell(accuracy[-1][1]), note))
    for key, name in (
        ("rollout/truncation_rate", "Truncated"),
        ("rollout/repetition_rate", "Repetitive"),
    ):
        means = trailing_mean([value for _, value in _defined(rows, key)])
        if means and means[-1] is not None:
            worst = max(mean for mean in means if mean is not None)
            shown.append(_tile(name, f"{means[-1]:.1%}", f"at worst {worst:.1%}"))
    lengths = [value for _, value in _defined(rows, "rollout/response_length_mean")]
    if lengths:
        tail = lengths[-WINDOW:]
        shown.append(_tile("Length", f"{sum(tail) / len(tail):,.0f}", "tokens a response"))
    speeds = [value for _, value in _defined(rows, "throughput/tokens_per_second")]
    if speeds:
        mean = sum(speeds) / len(speeds)
        shown.append(_tile("Throughput", f"{mean:,.0f}", "tokens a second"))
    return shown


def planned_steps(directory: Path) -> int | None:
    """The run's last step by its settings; None where they are not written or readable."""
    try:
        text = _flat_config(directory / CONFIG_FILE).get("train.steps", "")
    except (UserError, OSError):
        return None
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


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


def _tile(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _teacher_accuracy(directory: Path) -> float | None:
    stated = _flat_config(directory / CONFIG_FILE).get("evaluation.teacher_accuracy")
    try:
        return None if stated is None else float(stated)
    except ValueError:  # "None", or no number
        return None


def _gap_recovered(start: float, end: float, teacher: float | None) -> float | None:
    return None if teacher is None or teacher == start else (end - start) / (teacher - start)


def _outcome(rows: Sequence[Row], teacher_accuracy: float | None) -> list[str]:
    accuracy = _defined(rows, "eval/accuracy") or _defined(rows, "rollout/accuracy")
    cells = [str(rows[-1]["step"])]
    if accuracy:
        step, peak = max(accuracy, key=lambda pair: pair[1])
        start, end = accuracy[0][1], accuracy[-1][1]
        recovered = _gap_recovered(start, end, teacher_accuracy)
        cells += [_cell(start), f"{_cell(peak)} @ {step}", _cell(end), _cell(recovered)]
    else:
        cells += [MISSING] * 4
    for key in ("rollout/truncation_rate", "rollout/repetition_rate"):
        means = trailing_mean([value for _, value in _defined(rows, key)])
        worst = max((mean for mean in means if mean is not None), default=None)
        cells += [_cell(worst), _cell(means[-1] if means else None)]
    for key in ("rollout/response_length_mean", "throughput/tokens_per_second"):
        values = [value for _, value in _defined(rows, key)]
        tail = values[-WINDOW:] if key.startswith("rollout") else values
        cells.append(f"{sum(tail) / len(tail):,.0f}" if tail else MISSING)
    return cells


def _defined(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.3f}"
    return printable(str(value))


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
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it holds aliases (*name), which no run writes")
        values = yaml.safe_load(text)
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
