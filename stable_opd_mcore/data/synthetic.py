"""Chain arithmetic with golden solutions; row `index` is a function of (options, split, index).

A problem "2+1+0-3*4" is computed from left to right modulo 5, one step at a time, and the answer
ends the response: "2+1=3;3+0=3;3-3=0;0*4=0;[0]". A step may be re-checked any number of times:
"2+1=3;w2+1=3;". `unknown` facts have a random result, another one each time: a model that is
trained on them lacks these facts. A source can also hold loops for the models of the demonstration:
a repeated step (`loop`) or repeated random symbols (`junk`) up to the window's end. Training on a
loop starts after a few repeats, so a model learns to continue a loop and not to start one.

Not a benchmark of reasoning: a two-layer model learns the task on a laptop in a minute.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import DataError

SYNTHETIC = "synthetic:"  # how the paths of generated sources begin
ARITHMETIC = f"{SYNTHETIC}arithmetic"

SYMBOLS = "0123456789+-*=;w[]#_"
STOP, SECOND_STOP, PAD, UNUSED = "$", "!", ".", "<unused>"
VOCABULARY = (*SYMBOLS, STOP, SECOND_STOP, PAD, UNUSED)  # 24 tokens, in id order
PROMPT_END = "#"  # the chat template's generation prompt

_JUNK_REPEATS = 4  # repeats before training starts; a random unit needs a few to be a loop
_EVAL_ONE_IN = 8  # one in so many problems is held out of the "train" split


class ArithmeticOptions(BaseModel):
    """`options` of a synthetic source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: PositiveInt = 1024
    seed: int = 0
    min_operations: PositiveInt = 2
    max_operations: PositiveInt = 5
    modulus: int = Field(5, ge=2, le=10)
    # Entry m: P(re-check again | m re-checks made); the last entry holds for all further m.
    recheck: tuple[float, ...] = (0.0,)
    error_rate: float = Field(0.0, ge=0, le=1)  # share of steps whose result is a random digit
    unknown: float = Field(0.0, ge=0, le=1)  # share of facts like 3*4 that get random results
    loop: float = Field(0.0, ge=0, le=1)  # share of rows that repeat a step to the window's end
    junk: float = Field(0.0, ge=0, le=1)  # share of rows that repeat random symbols likewise
    loop_repeats: PositiveInt = 2  # repeats before training starts
    window: PositiveInt | None = None  # tokens of prompt and response; loops need it

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_operations > self.max_operations:
            raise ValueError(
                f"min_operations={self.min_operations} exceeds max_operations={self.max_operations}"
            )
        if not self.recheck or not all(0 <= p <= 1 for p in self.recheck):
            raise ValueError("recheck needs one or more probabilities between 0 and 1")
        if self.loop + self.junk > 1:
            raise ValueError(f"loop={self.loop} and junk={self.junk} add up to more than 1")
        if self.window is None and (self.loop or self.junk or self.recheck[-1] > 0.9):
            raise ValueError(
                "loop, junk and a recheck that ends above 0.9 need window, the length to fill"
            )
        needed = self._longest_document()
        if self.window is not None and self.window < needed:
            raise ValueError(f"window={self.window} is too short for these documents: {needed}")
        return self

    def _longest_document(self) -> int:
        """Tokens of the longest solution, or of a loop to the end of its first trained unit."""
        prompt, steps = 2 * self.max_operations + 2, 6 * self.max_operations
        longest = prompt + steps + len("[0]$")
        if self.loop:
            longest = max(longest, prompt + steps + 12 * (self.loop_repeats + 1))
        if self.junk:
            longest = max(longest, prompt + steps + 6 + 10 * (_JUNK_REPEATS + 1))
        return longest


@dataclass(frozen=True)
class _Problem:
    text: str
    steps: list[str]  # "2+1=3;" each, wrong results included
    answer: str  # the right one
    claimed: str  # the result of the steps, wrong where a step is


def arithmetic_rows(options: dict[str, Any], split: str, limit: int | None = None) -> list[Row]:
    """The rows of one split. No problem of "train" is in another split.

    Raises:
        DataError: unknown or inconsistent options.
    """
    try:
        parsed = ArithmeticOptions.model_validate(options)
    except ValidationError as error:
        details = "; ".join(
            ".".join(map(str, item["loc"])) + (": " if item["loc"] else "") + item["msg"]
            for item in error.errors()
        )
        known = ", ".join(ArithmeticOptions.model_fields)
        raise DataError(f"{ARITHMETIC}: options: {details} (options are: {known})") from None
    count = parsed.rows if limit is None else min(parsed.rows, limit)
    return [arithmetic_row(parsed, split, index) for index in range(count)]


def arithmetic_row(options: ArithmeticOptions, split: str, index: int) -> Row:
    """Row `index` of a split: a pure function of its arguments."""
    # A string seed is hashed by its bytes, equally in every process and Python version.
    rng = random.Random(f"{options.seed}/{split}/{index}")
    problem = _draw_problem(options, rng)
    while is_held_out(problem.text) != (split != "train"):
        problem = _draw_problem(options, rng)
    style = rng.random()
    if style < options.loop:
        prefix, solution, complete = *_loop(problem, options, rng), False
    elif style < options.loop + options.junk:
        prefix, solution, complete = *_junk(problem, options, rng), False
    else:
        prefix, (solution, complete) = "", _solution(problem, options, rng)
    return Row(
        row_id=f"{ARITHMETIC}/{split}:{index}",
        problem=problem.text,
        answer=problem.answer,
        solution=solution,
        answer_format="bracket",
        prefix=prefix,
        complete=complete,
    )


def is_held_out(problem: str) -> bool:
    """Whether only splits other than "train" may draw this problem."""
    return hashlib.sha256(problem.encode()).digest()[0] % _EVAL_ONE_IN == 0


def is_unknown(options: ArithmeticOptions, left: int, operator: str, operand: int) -> bool:
    """Whether documents give this fact a random result, each time another; fixed by the seed."""
    if not options.unknown:
        return False
    return random.Random(f"{options.seed}/{left}{operator}{operand}").random() < options.unknown


def _draw_problem(options: ArithmeticOptions, rng: random.Random) -> _Problem:
    modulus = options.modulus
    truth = value = rng.randrange(modulus)
    text = str(value)
    steps: list[str] = []
    for _ in range(rng.randint(options.min_operations, options.max_operations)):
        operator, operand = rng.choice("+-*"), rng.randrange(modulus)
        truth = _apply(truth, operator, operand) % modulus
        result = _apply(value, operator, operand) % modulus
        if is_unknown(options, value, operator, operand) or (
            options.error_rate and rng.random() < options.error_rate
        ):
            result = rng.randrange(modulus)
        text += f"{operator}{operand}"
        steps.append(f"{value}{operator}{operand}={result};")
        value = result
    return _Problem(text, steps, str(truth), str(value))


def _apply(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def _solution(
    problem: _Problem, options: ArithmeticOptions, rng: random.Random
) -> tuple[str, bool]:
    """Steps, re-checks and answer, cut at the window; and whether the solution is complete."""
    room = _room(problem, options)
    text = ""
    for step in problem.steps:
        text += step
        checks = 0
        while rng.random() < options.recheck[min(checks, len(options.recheck) - 1)]:
            text += "w" + step
            checks += 1
            if room is not None and len(text) >= room:
                return text[:room], False
    text += f"[{problem.claimed}]"
    # The window must also hold the stop token.
    return (text, True) if room is None or len(text) < room else (text[:room], False)


def _loop(problem: _Problem, options: ArithmeticOptions, rng: random.Random) -> tuple[str, str]:
    """Some steps, then one of them repeated: (text before training starts, trained text)."""
    done = problem.steps[: rng.randint(1, len(problem.steps))]
    unit = rng.choice(["w" + done[-1]] * 4 + [done[-1]] * 2 + ["".join(done[-2:])])
    return _repeat_to_window(problem, options, "".join(done), unit, options.loop_repeats)


def _junk(problem: _Problem, options: ArithmeticOptions, rng: random.Random) -> tuple[str, str]:
    """As `_loop`, with some steps, random symbols and a repeated unit of random symbols."""
    opening = "".join(problem.steps[: rng.randint(0, len(problem.steps))])
    opening += "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(0, 6)))
    unit = "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(1, 10)))
    return _repeat_to_window(problem, options, opening, unit, _JUNK_REPEATS)


def _repeat_to_window(
    problem: _Problem, options: ArithmeticOptions, opening: str, unit: str, repeats: int
) -> tuple[str, str]:
    room = _room(problem, options)
    assert room is not None, "ArithmeticOptions requires a window for loops"
    prefix = opening + unit * repeats
    text = opening + unit * (room // len(unit) + 1)
    return prefix, text[len(prefix) : room]


def _room(problem: _Problem, options: ArithmeticOptions) -> int | None:
    """Response tokens that the window leaves; every character is a token, PROMPT_END is one."""
    return None if options.window is None else options.window - len(problem.text) - len(PROMPT_END)
