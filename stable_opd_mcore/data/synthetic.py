"""Chain arithmetic with golden solutions; row `index` is a function of (options, split, index).

A problem "2+1+0-3*4" is computed from left to right modulo 5, one step at a time, and the answer
ends the response: "2+1=3;3+0=3;3-3=0;0*4=0;[0]". A step may be re-checked any number of times:
"2+1=3;w2+1=3;". `unknown` facts have a random result, a different one each time: a model that is
trained on them lacks these facts.

Not a benchmark of reasoning: a two-layer model learns the task on a laptop in a minute.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import DataError

SYNTHETIC = "synthetic:"  # how the paths of generated sources begin
ARITHMETIC = f"{SYNTHETIC}arithmetic"

STOP, SECOND_STOP, PAD, UNUSED = "$", "!", ".", "<unused>"
VOCABULARY = (*"0123456789+-*=;w[]#_", STOP, SECOND_STOP, PAD, UNUSED)  # 24 tokens, in id order
PROMPT_END = "#"  # the chat template's generation prompt

_EVAL_ONE_IN = 8  # one in this many problems is held out of the "train" split


class ArithmeticOptions(BaseModel):
    """`options` of a synthetic source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = Field(1024, gt=0, le=1_000_000)
    seed: int = 0
    min_operations: int = Field(2, gt=0, le=1000)
    max_operations: int = Field(5, gt=0, le=1000)
    modulus: int = Field(5, ge=2, le=10)
    # Entry m: P(re-check again | m re-checks made); the last entry holds for all further m.
    recheck: tuple[float, ...] = (0.0,)
    unknown: float = Field(0.0, ge=0, le=1)  # share of facts like 3*4 that get random results

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_operations > self.max_operations:
            raise ValueError(
                f"min_operations={self.min_operations} exceeds max_operations="
                f"{self.max_operations}; lower it"
            )
        if not self.recheck or not all(0 <= p < 1 for p in self.recheck):
            raise ValueError(f"recheck={self.recheck}; set probabilities from 0 to below 1")
        return self


@dataclass(frozen=True)
class _Problem:
    text: str
    steps: list[str]  # "2+1=3;" each, with the random results of unknown facts
    answer: str  # the right one
    claimed: str  # the result of the steps


def arithmetic_rows(options: dict[str, Any], split: str, limit: int | None = None) -> list[Row]:
    """The rows of one split; no problem of "train" is in another. A DataError for bad options."""
    try:
        parsed = ArithmeticOptions.model_validate(options)
    except ValidationError as error:
        details = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix(": Value error, ")
            for item in error.errors()
        )
        known = ", ".join(ArithmeticOptions.model_fields)
        raise DataError(f"{ARITHMETIC}: data.*.options: {details}; use {known}") from None
    count = parsed.rows if limit is None else min(parsed.rows, limit)
    return [arithmetic_row(parsed, split, index) for index in range(count)]


def arithmetic_row(options: ArithmeticOptions, split: str, index: int) -> Row:
    """Row `index` of a split: a pure function of its arguments."""
    # A string seed is hashed by its bytes, equally in every process and Python version.
    rng = random.Random(f"{options.seed}/{split}/{index}")
    problem = _random_problem(options, rng)
    while is_held_out(problem.text) != (split != "train"):
        problem = _random_problem(options, rng)
    rng.random()  # not used; without it rows with re-checks would not be those of earlier runs
    return Row(
        row_id=f"{ARITHMETIC}/{split}:{index}",
        problem=problem.text,
        answer=problem.answer,
        solution=_solution(problem, options, rng),
        answer_format="bracket",
    )


def is_held_out(problem: str) -> bool:
    """Whether only splits other than "train" may have this problem."""
    return hashlib.sha256(problem.encode()).digest()[0] % _EVAL_ONE_IN == 0


def is_unknown(options: ArithmeticOptions, left: int, operator: str, operand: int) -> bool:
    """Whether documents give this fact a random result, each time a new one; the seed decides."""
    if not options.unknown:
        return False
    return random.Random(f"{options.seed}/{left}{operator}{operand}").random() < options.unknown


def _random_problem(options: ArithmeticOptions, rng: random.Random) -> _Problem:
    modulus = options.modulus
    truth = value = rng.randrange(modulus)
    text = str(value)
    steps: list[str] = []
    for _ in range(rng.randint(options.min_operations, options.max_operations)):
        operator, operand = rng.choice("+-*"), rng.randrange(modulus)
        truth = _apply(truth, operator, operand) % modulus
        result = _apply(value, operator, operand) % modulus
        if is_unknown(options, value, operator, operand):
            result = rng.randrange(modulus)
        text += f"{operator}{operand}"
        steps.append(f"{value}{operator}{operand}={result};")
        value = result
    return _Problem(text, steps, str(truth), str(value))


def _apply(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def _solution(problem: _Problem, options: ArithmeticOptions, rng: random.Random) -> str:
    """Steps, re-checks and answer."""
    text = ""
    for step in problem.steps:
        text += step
        checks = 0
        while rng.random() < options.recheck[min(checks, len(options.recheck) - 1)]:
            text += "w" + step
            checks += 1
    return f"{text}[{problem.claimed}]"
