"""Rows of a file of generations: which column holds what, and rows that cannot be used.

A file may come from anywhere. A row that is no JSON object, lacks its response, or is too long is
refused: it is counted under its number and scoring goes on. Not here: grading and counting
(score.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.printable_text import printable_line
from stable_opd_mcore.records import AnswerFormat, FinishReason

MAX_LINE_BYTES = 64 * 2**20
NO_COLUMN = "none"  # as a column's name: do not look for one
# The names that are looked for in the first row; a dotted name reaches into nested objects.
_USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "response": (
        "response",
        "completion",
        "generation",
        "generated_text",
        "model_output",
        "output",
        "text",
    ),
    "gold": (
        "gold",
        "answer",
        "gold_answer",
        "ground_truth",
        "expected_answer",
        "target",
        "reward_model.ground_truth",
    ),
    "id": ("id", "prompt_id", "problem_id", "uuid", "uid"),
    "finish": ("finish_reason", "stop_reason", "truncated"),
    "tokens": ("response_token_ids", "output_token_ids", "output_ids", "token_ids"),
}
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "max_length": "length",
    "truncated": "length",
    "abort": "abort",
    "cancelled": "abort",
    "error": "abort",
}


@dataclass(frozen=True)
class Columns:
    """Where a row's values stand; None: the file has no such column."""

    response: str | None = None
    gold: str | None = None
    id: str | None = None
    finish: str | None = None
    tokens: str | None = None
    group: str | None = None
    label: str | None = None  # somebody else's verdict, to compare with


@dataclass(frozen=True)
class ScoreRow:
    """One response to score."""

    number: int  # line of the file, from 1
    response: str
    gold: str | None  # None: not graded
    row_id: str | None
    group: str | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None
    label: bool | None
    answer_format: AnswerFormat
    opens_thinking: bool


@dataclass(frozen=True)
class RefusedRow:
    """A row that cannot be scored."""

    number: int
    reason: str


class RowError(Exception):
    """Why a row is refused."""


def find_columns(path: Path, given: Columns) -> Columns:
    """The given columns, and usual names that the first readable row of `path` has.

    Raises:
        DataError: no row is a JSON object, a given column is not in the first that is one, or none
            of the usual names is there for the response.
    """
    with path.open("rb") as file:
        for _, _, line in read_lines(file):
            try:
                record = _parse(line)
            except RowError:
                continue
            found: dict[str, str | None] = {}
            for role, name in asdict(given).items():
                found[role] = _column(role, name, record)
                if name not in (None, NO_COLUMN) and _look_up(record, name) is _MISSING:
                    raise DataError(f"{path}: no column {name} (--{role}) among {_names(record)}")
            if found["response"] is None:
                raise DataError(
                    f"{path}: no column for the response among {_names(record)}; "
                    "name it with --response"
                )
            return replace(given, **found)
    raise DataError(f"{path}: no row is a JSON object; score reads JSON Lines")


def read_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    """(number from 1, bytes read so far, line) of each line; None for one above MAX_LINE_BYTES.

    Empty lines count, and are given. Memory stays at one line.
    """
    number = position = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        position += len(line)
        too_long = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
        rest = line
        while too_long and rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
            position += len(rest)
        yield number, position, None if too_long else line


def parse_row(number: int, line: bytes | None, columns: Columns) -> ScoreRow | RefusedRow:
    """The row of a line, or why it is refused."""
    try:
        record = _parse(line)
        return ScoreRow(
            number=number,
            response=_response(record, columns),
            gold=_gold(record, columns),
            row_id=_name(record, columns.id),
            group=_name(record, columns.group),
            finish_reason=_finish_reason(record, columns),
            token_ids=_token_ids(record, columns),
            label=_label(record, columns),
            # The columns of a run's rollouts and evaluations.
            answer_format=_one_of(record, "answer_format", get_args(AnswerFormat), "boxed"),
            opens_thinking=_one_of(record, "opens_thinking", (False, True), False),
        )
    except RowError as error:
        return RefusedRow(number, str(error))


def _parse(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise RowError(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
    if not line.strip():
        raise RowError("an empty line")
    try:
        record = json.loads(line.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {printable_line(str(error), 60)}") from error
    if not isinstance(record, dict):
        raise RowError(f"not a JSON object but {type(record).__name__}")
    return cast("dict[str, Any]", record)


def _column(role: str, given: str | None, record: dict[str, Any]) -> str | None:
    if given is not None:
        return None if given == NO_COLUMN else given
    usual = _USUAL_NAMES.get(role, ())
    return next((name for name in usual if _look_up(record, name) is not _MISSING), None)


_MISSING = object()


def _look_up(record: Any, column: str) -> Any:
    """The value of a column, or of a dotted path into it; _MISSING if there is none."""
    if not isinstance(record, dict):
        return _MISSING
    values = cast("dict[str, Any]", record)
    if column in values:
        return values[column]
    first, _, rest = column.partition(".")
    return _look_up(values.get(first), rest) if rest else _MISSING


def _value(record: dict[str, Any], column: str) -> Any:
    value = _look_up(record, column)
    if value is _MISSING:
        raise RowError(f"no column {column} among {_names(record)}")
    return value


def _wrong(column: str, value: Any, expected: str) -> RowError:
    return RowError(f"column {column} is {printable_line(repr(value), 60)}; expected {expected}")


def _names(record: dict[str, Any]) -> str:
    return printable_line(", ".join(sorted(record)) or "none", 200)


def _response(record: dict[str, Any], columns: Columns) -> str:
    assert columns.response is not None
    value = _value(record, columns.response)
    if not isinstance(value, str):
        raise _wrong(columns.response, value, "text")
    return value


def _gold(record: dict[str, Any], columns: Columns) -> str | None:
    if columns.gold is None:
        return None
    value = _value(record, columns.gold)
    parts = cast("list[Any]", value if isinstance(value, list) else [value])
    if value is None or not parts:
        return None
    for part in parts:
        number = isinstance(part, int | float) and not isinstance(part, bool)
        if not (isinstance(part, str) or (number and math.isfinite(part))):
            raise _wrong(columns.gold, value, "text, a number or null")
    return ", ".join(str(part) for part in parts).strip() or None


def _name(record: dict[str, Any], column: str | None) -> str | None:
    if column is None:
        return None
    value = _value(record, column)
    if not isinstance(value, str | int | float | None):
        raise _wrong(column, value, "text or a number")
    return None if value is None else str(value)[:200]


def _finish_reason(record: dict[str, Any], columns: Columns) -> FinishReason | None:
    if columns.finish is None:
        return None
    given = value = _value(record, columns.finish)
    if isinstance(value, dict):  # SGLang's form
        value = cast("dict[str, Any]", value).get("type")
    if isinstance(value, bool):
        return "length" if value else "stop"
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in _FINISH_REASONS:
        expected = f"true, false, null or one of {', '.join(_FINISH_REASONS)}; --finish none"
        raise _wrong(columns.finish, given, f"{expected} ignores it")
    return _FINISH_REASONS[value.lower()]


def _token_ids(record: dict[str, Any], columns: Columns) -> list[int] | None:
    if columns.tokens is None:
        return None
    value = _value(record, columns.tokens)
    if not isinstance(value, list) or not all(
        type(token) is int and 0 <= token < 2**31 for token in cast("list[Any]", value)
    ):
        raise _wrong(columns.tokens, value, "a list of token ids")
    return cast("list[int]", value)


def _label(record: dict[str, Any], columns: Columns) -> bool | None:
    if columns.label is None:
        return None
    value = _value(record, columns.label)
    if value is not None and value not in (0, 1):
        raise _wrong(columns.label, value, "true, false, 0, 1 or null")
    return None if value is None else bool(value)


def _one_of(record: dict[str, Any], column: str, values: tuple[Any, ...], default: Any) -> Any:
    value = record.get(column, default)
    if value not in values:
        raise _wrong(column, value, f"one of {', '.join(map(str, values))}")
    return value
