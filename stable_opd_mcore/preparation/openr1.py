"""Which rows of OpenR1-Math-220k can be trained on, and with which of their generations.

A row needs a problem and a final answer, must be no proof, and needs a generation that is correct
by Math-Verify, complete, and not cut at its length. The data set carries these verdicts. Not here:
lengths, benchmarks and control tokens, which are checked for every recipe (rules.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.errors import DataError

REQUIRED_COLUMNS = (
    "problem",
    "answer",
    "generations",
    "correctness_math_verify",
    "is_reasoning_complete",
)
COLUMNS = (*REQUIRED_COLUMNS, "question_type", "finish_reasons")
_VERDICTS = ("correctness_math_verify", "is_reasoning_complete")


@dataclass(frozen=True)
class Candidate:
    """A row that may be kept."""

    problem: str
    answer: str | None
    solutions: tuple[str, ...]  # the shortest one is kept; empty: the data have none


@dataclass(frozen=True)
class Dropped:
    """A row that is not kept."""

    reason: str  # rows are counted by it
    detail: str = ""


def openr1_problem(record: Mapping[str, Any], place: str) -> str:
    """The problem's text; "" if it is null.

    Raises:
        DataError: the column holds no text.
    """
    return _text(record, "problem", place)


def openr1_candidate(record: Mapping[str, Any], place: str) -> Candidate | Dropped:
    """The row with its usable generations, or the reason why it is dropped.

    Args:
        place: file and row, for errors.

    Raises:
        DataError: a column without its type, or lists of different lengths.
    """
    problem = openr1_problem(record, place)
    answer = _text(record, "answer", place)
    if not problem:
        return Dropped("empty problem")
    if not answer:
        return Dropped("empty answer")
    if record.get("question_type") == "proof" or answer.lower() == "proof":
        return Dropped("proof")
    generations = _usable_generations(record, place)
    if not generations:
        return Dropped("no correct and complete generation")
    return Candidate(problem, answer, tuple(generations))


def _usable_generations(record: Mapping[str, Any], place: str) -> list[str]:
    """Generations that are correct and complete; none if one of the two lists is null."""
    for column in ("generations", *_VERDICTS):
        if column not in record:
            raise DataError(f"{place}: no column {column!r}; it has {', '.join(record)}")
    generations = record["generations"] or []
    if not isinstance(generations, list) or not all(isinstance(g, str) for g in generations):
        raise DataError(f"{place}: column 'generations' is no list of texts")
    if not generations:
        return []
    flags: list[list[Any]] = []
    for column in _VERDICTS:
        values = record[column]
        if values is None:
            return []
        if not isinstance(values, list):
            raise DataError(f"{place}: column {column!r} is no list of booleans")
        if len(values) != len(generations):
            raise DataError(
                f"{place}: {len(values)} values of {column!r} for {len(generations)} generations"
            )
        flags.append(values)
    reasons = record.get("finish_reasons") or [None] * len(generations)
    if not isinstance(reasons, list) or len(reasons) != len(generations):
        raise DataError(f"{place}: 'finish_reasons' is no list of {len(generations)} texts")
    usable = zip(generations, *flags, reasons, strict=True)
    return [
        text
        for text, correct, complete, reason in usable
        if correct and complete and reason != "length"
    ]


def _text(record: Mapping[str, Any], column: str, place: str) -> str:
    """A column's text without outer spaces; "" if it is null or missing."""
    value = record.get(column)
    if not isinstance(value, str | None):
        raise DataError(f"{place}: column {column!r} holds {type(value).__name__}, not text")
    return (value or "").strip()
