"""Rows of a file of generations: which column holds what, and rows that cannot be used.

A file may come from anywhere. A row that is not a JSON object, lacks its response, or is too long
is refused with a reason. A row whose columns hold different gold answers ends the reading: one of
them may be the model's own answer.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, BinaryIO, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.evaluation.answers import same_letters
from stable_opd_mcore.evaluation.grading import GradingItem
from stable_opd_mcore.host.printable_text import printable_line
from stable_opd_mcore.records import AnswerFormat, GradingFailure

MAX_LINE_BYTES = 64 * 2**20
NO_COLUMN = "none"  # a column's name: do not look for one
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Looked for in the first row with a response; a dotted name reaches into nested objects.
_USUAL_NAMES = {
    "response": "response completion generation generated_text model_output output text",
    "gold": "gold answer gold_answer ground_truth expected_answer target reward_model.ground_truth",
    "id": "id prompt_id problem_id uuid uid",
    "finish": "finish_reason stop_reason truncated",
    "tokens": "response_token_ids output_token_ids output_ids token_ids",
}
_ENDINGS: dict[str, Ending] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), Ending.STOP),
    **dict.fromkeys(
        ("length", "max_tokens", "max_length", "truncated", "turns", "window"), Ending.LENGTH
    ),
    **dict.fromkeys(("abort", "cancelled", "error", "failed"), Ending.ABORTED),
}
# Columns that are read only in files of a run, which also have _MARK_OF_A_RUN. In other files these
# names may mean anything.
_OF_A_RUN = ("answer_format", "opens_thinking")
_MARK_OF_A_RUN = "prompt_token_ids"
_OF_AN_EPISODE = ("reward", "grading_failure")  # which an environment or an agent has rewarded
_MARK_OF_AN_EPISODE = "seed"
_MISSING = object()


@dataclass(frozen=True)
class Columns:
    """The names of a file's columns; None: the file has no such column."""

    response: str | None = None
    gold: str | None = None
    id: str | None = None
    finish: str | None = None
    tokens: str | None = None
    group: str | None = None
    other_golds: tuple[str, ...] = ()  # more columns that may hold the gold answer


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


def _ending(value: Any) -> Ending | None:
    if isinstance(value, dict):  # SGLang's form
        value = cast("dict[str, Any]", value).get("type")
    if isinstance(value, bool):
        return Ending.LENGTH if value else Ending.STOP
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in _ENDINGS:
        return _ENDINGS[value.lower()]
    names = ", ".join(_ENDINGS)
    raise ValueError(f"expected true, false, null or one of {names}; --finish none ignores it")


_Name = Annotated[str | None, BeforeValidator(_name)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ResponseRow(BaseModel):
    """One response to grade: the columns of `Columns`, and those of a run."""

    model_config = ConfigDict(strict=True, frozen=True)

    response: str
    gold: Annotated[str | None, BeforeValidator(_gold)] = None  # None: not graded
    id: _Name = None
    finish: Annotated[Ending | None, BeforeValidator(_ending)] = None
    tokens: list[_TokenId] | None = None
    group: _Name = None
    answer_format: AnswerFormat = "boxed"
    opens_thinking: bool = False
    reward: FiniteFloat | None = None  # of an episode: the text is not graded
    grading_failure: GradingFailure | None = None

    def item(self, stopped: bool) -> GradingItem | None:
        if self.gold is None or self.reward is not None:
            return None
        return GradingItem(
            self.response, self.gold, self.answer_format, self.opens_thinking, stopped
        )


def find_columns(lines: Iterable[bytes | None], name: str, given: Columns) -> Columns:
    """The given columns, and usual names that the first readable row with a response has.

    Raises:
        DataError: no row is a JSON object, none has a response under the given or a usual name, or
            a given column is not in the first that has one; the message begins with `name`.
    """
    asked = {role: column for role, column in asdict(given).items() if isinstance(column, str)}
    candidates = {role: names.split() for role, names in _USUAL_NAMES.items()}
    candidates |= {role: [each] if each != NO_COLUMN else [] for role, each in asked.items()}
    first: dict[str, Any] | None = None
    for line in lines:
        try:
            record = _parse(line)
        except RowError:
            continue
        first = record if first is None else first
        found = {
            role: next((each for each in names if _look_up(record, each) is not _MISSING), None)
            for role, names in candidates.items()
        }
        if found["response"] is None:
            continue
        for role in asked:
            if candidates[role] and found[role] is None:
                raise DataError(
                    f"{name}: no column {asked[role]}; give --{role} one of {_names(record)}"
                )
        others = [
            each
            for each in candidates["gold"]
            if each != found["gold"] and _look_up(record, each) is not _MISSING
        ]
        is_certain = found["gold"] == "gold"
        return Columns(**found, other_golds=() if is_certain else tuple(others))
    if first is None:
        raise DataError(f"{name}: no row is a JSON object; give a file of JSON Lines")
    raise DataError(
        f"{name}: no column {given.response or 'for the response'} among {_names(first)}; name the "
        "response's with --response"
    )


def read_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Each line without a byte order mark, empty ones included; None for a longer one."""
    mark = _BYTE_ORDER_MARK
    while line := file.readline(MAX_LINE_BYTES):
        too_long = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
        yield None if too_long else line.removeprefix(mark)
        while too_long and line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        mark = b""


def parse_row(line: bytes | None, columns: Columns, may_lack_tokens: bool = False) -> ResponseRow:
    """The row of a line; a RowError with a printable message says why it is refused.

    With `may_lack_tokens` its token ids may be null where the file has a column of them.

    Raises:
        DataError: columns hold different gold answers; the message does not name the row.
    """
    record = _parse(line)
    names = {role: name for role, name in asdict(columns).items() if isinstance(name, str)}
    for other in columns.other_golds:
        _require_same_gold(record, names["gold"], other)
    values = {role: _look_up(record, name) for role, name in names.items()}
    for role, value in values.items():
        if value is _MISSING:
            raise RowError(f"no column {names[role]} among {_names(record)}")
    if _MARK_OF_A_RUN in record:
        own = _OF_A_RUN + (_OF_AN_EPISODE if _MARK_OF_AN_EPISODE in record else ())
        values |= {name: record[name] for name in own if name in record}
        values |= _of_last_turn(values, record.get("turns"))
    if not may_lack_tokens and "tokens" in values and values["tokens"] is None:
        raise RowError(
            f"column {names['tokens']} is null: expected a list of token ids; --tokenizer counts "
            "those of the text"
        )
    try:
        return ResponseRow(**values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    role, reason = str(fault["loc"][0]), fault["msg"].removeprefix("Value error, ")
    value = printable_line(repr(values[role]), 60)
    raise RowError(f"column {names.get(role, role)} is {value}: {reason}")


def _require_same_gold(record: dict[str, Any], chosen: str, other: str) -> None:
    values = {name: _look_up(record, name) for name in (chosen, other)}
    first, second = (_final_answer(value) for value in values.values())
    if second and first != second and not same_letters(first, second):
        shown = " and ".join(
            f"{name} is {printable_line(repr(value), 60)}" for name, value in values.items()
        )
        raise DataError(
            f"column {shown}: expected one gold answer; name its column with --gold {chosen} or "
            f"--gold {other}"
        )


def _final_answer(value: Any) -> str:
    """A gold answer without GSM8K's solution, 2 for 2.0; "" where the value is none."""
    try:
        answer = (_gold(None if value is _MISSING else value) or "").rpartition("####")[2].strip()
    except ValueError:
        return ""
    return re.sub(r"\A(-?\d+)\.0+\Z", r"\1", answer.replace(",", ""))


def _of_last_turn(values: dict[str, Any], turns: Any) -> dict[str, Any]:
    """Tokens and finish reason of an episode's last turn, whose text is the response; empty without
    turns."""
    if not turns:
        return {}
    try:
        number, finish = int(turns[-1]["num_tokens"]), turns[-1]["finish_reason"]
        tokens = values.get("tokens") or []
        found = {"tokens": tokens[max(0, len(tokens) - number) :], "finish": finish}
    except (LookupError, TypeError, ValueError):
        value = printable_line(repr(turns), 60)
        raise RowError(f"column turns is {value}: expected the turns of an episode") from None
    return {role: value for role, value in found.items() if role in values}


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
