"""The report's tables: outcomes of the runs, settings that differ, sample rollouts.

Text from a run's files is untrusted: it becomes plain strings with visible control characters, and
the template escapes them. Not here: the curves (figures.py).
"""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stable_opd_mcore.data.rollout_files import read_rollouts, rollout_path
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.monitoring.figures import WINDOW, Row, trailing_mean
from stable_opd_mcore.monitoring.health import ZLIB_LEVEL
from stable_opd_mcore.records import Rollout

CONFIG_FILE = "config.resolved.yaml"
HEAD_CHARACTERS, TAIL_CHARACTERS = 1500, 700  # of a sample that is longer than both
MISSING = "\N{EN DASH}"

# {"columns": [str], "rows": [[str]], "texts": number of leading columns that hold words}
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


def sample_rollouts(directory: Path, rows: Sequence[Row]) -> list[dict[str, str]]:
    """Sample rollouts for the report; empty without stored steps.

    They are the first rollout of the first and of the last stored step, and the most repetitive
    rollout of the stored step with the highest repetition rate (then truncation rate).

    Raises:
        UserError: a stored rollout is malformed; the message names file and line.
    """
    stored = [row for row in rows if rollout_path(directory, row["step"]).is_file()]
    if not stored:
        return []
    worst = max(stored, key=_badness)["step"]
    first, last = stored[0]["step"], stored[-1]["step"]
    chosen = []
    for title, step in (("First step", first), ("Last step", last)):
        chosen += [(title, step, r) for r in read_rollouts(rollout_path(directory, step))[:1]]
    candidates = read_rollouts(rollout_path(directory, worst))
    if candidates:
        most = max(candidates, key=lambda rollout: compression(rollout.text))
        chosen.append(("Most repetitive", worst, most))
    return [_sample(title, step, rollout) for title, step, rollout in chosen]


def compression(text: str) -> float:
    """Compression ratio of the whole text: bytes / zlib bytes; 0 for an empty one."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data, ZLIB_LEVEL)) if data else 0.0


def printable(text: str) -> str:
    """`text` with visible control characters.

    ASCII control characters become their Unicode pictures; direction overrides, lone surrogates
    and unassigned characters become the replacement character.
    """
    return "".join(_printable_character(character) for character in text)


def _printable_character(character: str) -> str:
    if character in "\n\t" or character.isprintable():
        return character
    category = unicodedata.category(character)
    if category == "Cc":
        return (
            chr(0x2400 + ord(character)) if ord(character) < 0x20 else "\N{REPLACEMENT CHARACTER}"
        )
    return "\N{REPLACEMENT CHARACTER}" if category in ("Cf", "Cs", "Cn", "Co") else " "


def _sample(title: str, step: int, rollout: Rollout) -> dict[str, str]:
    text = rollout.text
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        skipped = len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS
        gap = f"\n\N{HORIZONTAL ELLIPSIS} {skipped:,} characters \N{HORIZONTAL ELLIPSIS}\n"
        text = text[:HEAD_CHARACTERS] + gap + text[-TAIL_CHARACTERS:]
    facts = [
        f"step {step}",
        f"{len(rollout.token_ids):,} tokens",
        {"stop": "stopped", "length": "truncated", "abort": "aborted"}[rollout.finish_reason],
        f"compresses {compression(rollout.text):.1f}\N{MULTIPLICATION SIGN}",
    ]
    if rollout.reward is not None:
        facts.append(f"reward {rollout.reward:g}")
    return {
        "title": title,
        "facts": " \N{MIDDLE DOT} ".join(facts),
        "prompt": printable(rollout.prompt.text),
        "answer": printable(rollout.prompt.answer or MISSING),
        "response": printable(text),
    }


def _badness(row: Row) -> tuple[float, float]:
    return (row.get("rollout/repetition_rate") or 0.0, row.get("rollout/truncation_rate") or 0.0)


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


def _flat_config(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
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
