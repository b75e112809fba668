"""Rows of a file of generations: which column holds what, and rows that cannot be used.

A file may come from anywhere. A row that is no JSON object, lacks its response, or is too long is
refused with a reason. Not here: grading and counting (score.py).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, BinaryIO, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.evaluation.grading import GradingItem
from stable_opd_mcore.host.printable_text import printable_line
from stable_opd_mcore.records import AnswerFormat, FinishReason

MAX_LINE_BYTES = 64 * 2**20
NO_COLUMN = "none"  # as a column's name: do not look for one
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Looked for in the first row with a response; a dotted name reaches into nested objects.
_USUAL_NAMES = {
    "response": "response completion generation generated_text model_output output text",
    "gold": "gold answer gold_answer ground_truth expected_answer target reward_model.ground_truth",
    "id": "id prompt_id problem_id uuid uid",
    "finish": "finish_reason stop_reason truncated",
    "tokens": "response_token_ids output_token_ids output_ids token_ids",
}
_FINISH_REASONS: dict[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_length", "truncated"), "length"),
    **dict.fromkeys(("abort", "cancelled", "error"), "abort"),
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


class RowError(Exception):
    """Why a row is refused."""


def _gold(value: Any) -> str | None:
    parts = cast("list[Any]", value if isinstance(value, list) else [value])
    if value is None or not parts:
        return None
    for part in parts:
        number = isinstance(part, int | float) and not isinstance(part, bool)
        if not (isinstance(part, str) or (number and math.isfinite(part))):
            raise ValueError("expected text, a number or null")
    return ", ".join(str(part) for part in parts).strip() or None


def _name(value: Any) -> str | None:
    if not isinstance(value, str | int | float | None):
        raise ValueError("expected text or a number")
    return None if value is None else str(value)[:200]


def _finish_reason(value: Any) -> FinishReason | None:
    if isinstance(value, dict):  # SGLang's form
        value = cast("dict[str, Any]", value).get("type")
    if isinstance(value, bool):
        return "length" if value else "stop"
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in _FINISH_REASONS:
        return _FINISH_REASONS[value.lower()]
    names = ", ".join(_FINISH_REASONS)
    raise ValueError(f"expected true, false, null or one of {names}; --finish none ignores it")


def _label(value: Any) -> bool | None:
    if value is not None and value not in (0, 1):
        raise ValueError("expected true, false, 0, 1 or null")
    return None if value is None else bool(value)


def _given(value: Any) -> Any:
    if value is None:
        raise ValueError("expected a list of token ids")
    return value


_Name = Annotated[str | None, BeforeValidator(_name)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Columns of a run's rollouts and evaluations, which also have the marking one. In other files these
# names may mean anything.
_OF_A_RUN = ("answer_format", "opens_thinking")
_MARK_OF_A_RUN = "prompt_token_ids"


class ScoreRow(BaseModel):
    """One response to score: the columns of `Columns`, and those of a run."""

    model_config = ConfigDict(strict=True, frozen=True)

    response: str
    gold: Annotated[str | None, BeforeValidator(_gold)] = None  # None: not graded
    id: _Name = None
    finish: Annotated[FinishReason | None, BeforeValidator(_finish_reason)] = None
    tokens: Annotated[list[_TokenId] | None, BeforeValidator(_given)] = None
    group: _Name = None
    label: Annotated[bool | None, BeforeValidator(_label)] = None
    answer_format: AnswerFormat = "boxed"
    opens_thinking: bool = False

    def item(self, stopped: bool) -> GradingItem | None:
        """What to grade; None without a gold answer."""
        if self.gold is None:
            return None
        return GradingItem(
            self.response, self.gold, self.answer_format, self.opens_thinking, stopped
        )


def find_columns(file: BinaryIO, name: str, given: Columns) -> Columns:
    """The given columns, and usual names that the first readable row with a response has.

    Raises:
        DataError: no row is a JSON object, none has a response under the given or a usual name, or
            a given column is not in the first that has one.
    """
    responses = [given.response] if given.response else _USUAL_NAMES["response"].split()
    first: dict[str, Any] | None = None
    for _, line in read_lines(file):
        try:
            record = _parse(line)
        except RowError:
            continue
        first = record if first is None else first
        if any(_look_up(record, column) is not _MISSING for column in responses):
            return _columns_of(record, name, given)
    if first is None:
        raise DataError(f"{name}: no row is a JSON object; score reads JSON Lines")
    if given.response not in (None, NO_COLUMN):
        raise DataError(f"{name}: no column {given.response} (--response) among {_names(first)}")
    raise DataError(
        f"{name}: no column for the response among {_names(first)}; name it with --response"
    )


def _columns_of(record: dict[str, Any], name: str, given: Columns) -> Columns:
    """The given columns; for the others the first usual name that the record has.

    Raises:
        DataError: the record lacks a given column.
    """
    found: dict[str, str | None] = {}
    for role, column in asdict(given).items():
        usual = _USUAL_NAMES.get(role, "").split()
        there = [each for each in usual if _look_up(record, each) is not _MISSING]
        found[role] = next(iter(there), None) if column is None else column
        if column == NO_COLUMN:
            found[role] = None
        elif column is not None and _look_up(record, column) is _MISSING:
            raise DataError(f"{name}: no column {column} (--{role}) among {_names(record)}")
    return Columns(**found)


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(its bytes in the file, the line) of each line; None for one above MAX_LINE_BYTES.

    Empty lines count, and are given. A byte order mark is dropped. Memory stays at one line.
    """
    mark = _BYTE_ORDER_MARK
    while line := file.readline(MAX_LINE_BYTES):
        size = len(line)
        too_long = size == MAX_LINE_BYTES and not line.endswith(b"\n")
        rest = line
        while too_long and rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
            size += len(rest)
        yield size, None if too_long else line.removeprefix(mark)
        mark = b""


def parse_row(line: bytes | None, columns: Columns) -> ScoreRow:
    """The row of a line.

    Raises:
        RowError: the row is refused; the message is printable and says why.
    """
    record = _parse(line)
    names: dict[str, str] = {role: name for role, name in asdict(columns).items() if name}
    values = {role: _look_up(record, name) for role, name in names.items()}
    for role, value in values.items():
        if value is _MISSING:
            raise RowError(f"no column {names[role]} among {_names(record)}")
    if _MARK_OF_A_RUN in record:
        values |= {name: record[name] for name in _OF_A_RUN if name in record}
    try:
        return ScoreRow(**values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    role, reason = str(fault["loc"][0]), fault["msg"].removeprefix("Value error, ")
    value = printable_line(repr(values[role]), 60)
    raise RowError(f"column {names.get(role, role)} is {value}: {reason}")


def _parse(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise RowError(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
    if not line.strip():
        raise RowError("an empty line")
    try:
        # Not orjson: it refuses a lone surrogate, which a decoder may leave of an emoji.
        record = json.loads(line.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {printable_line(str(error), 60)}") from error
    if not isinstance(record, dict):
        raise RowError(f"not a JSON object but {type(record).__name__}")
    return cast("dict[str, Any]", record)


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


def _names(record: dict[str, Any]) -> str:
    return printable_line(", ".join(sorted(record)) or "none", 200)
