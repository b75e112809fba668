"""The paper's training set, selected from the rows of OpenR1-Math-220k.

A row is kept if one of its generations is correct by Math-Verify, complete and at most 8192 tokens
long; the shortest such generation becomes the golden solution. Proofs and rows without an answer
are dropped. Dropped rows are counted by reason. Not here: reading files (data/sources.py).
"""

# Not strict: the records of a data set have no types.
# pyright: basic

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import DataError

MAX_TOKENS = 8192
_COLUMNS = {
    "generations": "texts",
    "correctness_math_verify": "booleans",
    "is_reasoning_complete": "booleans",
}


@dataclass(frozen=True)
class Selection:
    """The rows that are kept, in order, and the number of dropped rows by reason."""

    rows: tuple[Row, ...]
    dropped: Mapping[str, int]


def select_rows(
    records: Iterable[tuple[int, Mapping[str, Any]]],
    count_tokens: Callable[[str], int],
    max_tokens: int = MAX_TOKENS,
    name: str = "openr1",
) -> Selection:
    """Apply the selection to (number, record) pairs.

    Args:
        count_tokens: length of a generation in the student's tokens.
        name: first part of every row id.

    Raises:
        DataError: a record without OpenR1's columns, or with lists of different lengths.
    """
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for number, record in records:
        chosen = select_row(record, count_tokens, max_tokens, f"{name}:{number}")
        if isinstance(chosen, Row):
            rows.append(chosen)
        else:
            dropped[chosen] += 1
    return Selection(tuple(rows), dict(dropped))


def select_row(
    record: Mapping[str, Any],
    count_tokens: Callable[[str], int],
    max_tokens: int,
    row_id: str,
) -> Row | str:
    """The row with its shortest usable generation, or the reason why it is dropped."""
    answer = _text(record, "answer", row_id)
    if not answer:
        return "empty answer"
    if record.get("question_type") == "proof" or answer.lower() == "proof":
        return "proof"
    candidates = _usable_generations(record, row_id)
    if not candidates:
        return "no correct and complete generation"
    length, generation = min(
        ((count_tokens(text), text) for text in candidates), key=lambda candidate: candidate[0]
    )
    if length > max_tokens:
        return f"longer than {max_tokens} tokens"
    problem = _text(record, "problem", row_id)
    if not problem:
        raise DataError(f"{row_id}: column 'problem' is empty or missing; remove the row")
    return Row(row_id=row_id, problem=problem, answer=answer, solution=generation)


def split_rows(rows: Iterable[Row], num_first: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Shuffle rows and split them into two parts; the first has at most num_first rows.

    Rows with the same problem fall into the same part, so no OPD prompt is trained on in SFT.

    Raises:
        DataError: fewer than num_first + 1 rows.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.problem, []).append(row)
    total = sum(map(len, groups.values()))
    if total <= num_first:
        raise DataError(
            f"{total} rows cannot be split into {num_first} and a second part; use more rows"
        )
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    first: list[Row] = []
    second: list[Row] = []
    for group in order:
        (first if len(first) + len(group) <= num_first else second).extend(group)
    return first, second


def _usable_generations(record: Mapping[str, Any], row_id: str) -> list[str]:
    """Generations that are correct and complete; none if one of the two lists is null."""
    for column, kind in _COLUMNS.items():
        if column not in record:
            raise DataError(
                f"{row_id}: no column {column!r} ({kind}); this selection reads the rows of "
                "open-r1/OpenR1-Math-220k"
            )
    generations = record["generations"] or []
    if not isinstance(generations, list) or not all(isinstance(g, str) for g in generations):
        raise DataError(f"{row_id}: column 'generations' is no list of texts")
    flags = []
    for column in ("correctness_math_verify", "is_reasoning_complete"):
        values = record[column]
        if values is None:
            return []
        if not isinstance(values, list):
            raise DataError(f"{row_id}: column {column!r} is no list of booleans")
        if len(values) != len(generations):
            raise DataError(
                f"{row_id}: {len(values)} values of {column!r} for {len(generations)} generations"
            )
        flags.append(values)
    reasons = record.get("finish_reasons") or [None] * len(generations)
    if not isinstance(reasons, list) or len(reasons) != len(generations):
        raise DataError(f"{row_id}: 'finish_reasons' is no list of {len(generations)} texts")
    finished = [reason != "length" for reason in reasons]
    usable = zip(generations, *flags, finished, strict=True)
    return [text for text, correct, complete, ended in usable if correct and complete and ended]


def _text(record: Mapping[str, Any], column: str, row_id: str) -> str:
    """A column's text without outer spaces; "" if it is null or missing."""
    value = record.get(column)
    if not isinstance(value, str | None):
        raise DataError(f"{row_id}: column {column!r} holds {type(value).__name__}, not text")
    return (value or "").strip()
