"""Which rows of OpenR1-Math-220k can be trained on, and with which of their generations.

A row needs a problem and a final answer, must not be a proof, and needs a generation that is
correct by Math-Verify, complete, and not cut at its length. The data set carries these verdicts.
rules.py checks lengths, benchmarks and control tokens for every recipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.json_files import validated

REQUIRED_COLUMNS = (
    "problem",
    "answer",
    "generations",
    "correctness_math_verify",
    "is_reasoning_complete",
)
COLUMNS = (*REQUIRED_COLUMNS, "question_type", "finish_reasons")


@dataclass(frozen=True)
class Candidate:
    problem: str
    answer: str | None
    solutions: tuple[str, ...]  # the shortest one is kept; empty: the data have none


@dataclass(frozen=True)
class Dropped:
    reason: str  # rows are counted by it
    detail: str = ""


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)

    problem: str | None = None
    answer: str | None = None
    question_type: str | None = None
    generations: list[str] | None = None
    correctness_math_verify: list[bool | None] | None = None
    is_reasoning_complete: list[bool | None] | None = None
    finish_reasons: list[str | None] | None = None


def read_openr1(record: Mapping[str, Any], place: str) -> tuple[str, Candidate | Dropped]:
    """The problem, and the row with its usable generations or the reason why it is dropped.

    Raises:
        DataError: a value of another type, or lists of different lengths.
    """
    row = validated(_Row, dict(record), place)
    problem, answer = (row.problem or "").strip(), (row.answer or "").strip()
    generations = _usable_generations(row, place)
    reasons = {
        "empty problem": not problem,
        "empty answer": not answer,
        "proof": row.question_type == "proof" or answer.lower() == "proof",
        "no correct and complete generation": not generations,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return problem, Dropped(reason) if reason else Candidate(problem, answer, tuple(generations))


def _usable_generations(row: _Row, place: str) -> list[str]:
    """Generations that are correct and complete; none if one of the lists of verdicts is null."""
    texts, correct = row.generations, row.correctness_math_verify
    complete = row.is_reasoning_complete
    if not texts or correct is None or complete is None:
        return []
    reasons = row.finish_reasons or [None] * len(texts)
    lengths = [len(values) for values in (texts, correct, complete, reasons)]
    if len(set(lengths)) > 1:
        raise DataError(
            f"{place}: {lengths[0]} generations, but {lengths[1]} values of "
            f"correctness_math_verify, {lengths[2]} of is_reasoning_complete and {lengths[3]} of "
            "finish_reasons; expected one for each"
        )
    return [
        text
        for text, is_correct, is_complete, reason in zip(
            texts, correct, complete, reasons, strict=True
        )
        if is_correct and is_complete and reason != "length"
    ]
