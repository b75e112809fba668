"""What a grading process does: math-verify's judgement of one response, or the user's.

Imports only the standard library and what judges, so that a worker starts fast and holds no part of
a distributed run. Not here: the pool of workers and an item's time limit (grading.py).
"""

import os
import re
import signal
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from stable_opd_mcore.evaluation.answers import (
    alternatives,
    lacks_entries,
    of_a_choice,
    one_formula,
    other_readings,
    plain_answer,
    plain_boxes,
    readable,
    same_letters,
    with_units,
)
from stable_opd_mcore.evaluation.notation import with_plain_digits
from stable_opd_mcore.evaluation.vectors import components, same_quantity
from stable_opd_mcore.evaluation.wording import in_tags, is_changed, stated
from stable_opd_mcore.host.user_code import Reward, UserFunction, as_reward
from stable_opd_mcore.host.worker_processes import start_user_code

_MEMORY_GIB = 4.0
_LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")
_GSM8K_ANSWER = re.compile(r"(?:\A|\n)####[ \t]*([^\n]+?)\s*\Z")
_FINAL_ANSWER = re.compile(r"final answer is.{1,200}I hope", re.IGNORECASE | re.DOTALL)
_SMALL, _DIGITS = 1e-3, 1e-6
_LARGE, _DOUBLE_DIGITS = 1e9, 1e-14


def is_right(response: str, gold: str) -> bool:
    """Whether the response's answer is the gold answer: letter by letter, or by math-verify.

    If a response ends in GSM8K's "#### answer", only that answer counts; a box that never ends is
    not an answer. math-verify extracts the others. Its own timeouts are off: they are signals,
    which do not interrupt C code.
    """
    response, answer = plain_boxes(readable(with_plain_digits(in_tags(response))))
    last_line, gold = _GSM8K_ANSWER.search(response), _gold_text(gold)
    if answer != "" and not last_line and (statement := stated(response, gold)):
        response, answer = plain_boxes(rf"\boxed{{{statement}}}")
    given_line = plain_answer(last_line[1]) if last_line else ""
    given = _parsed(with_units(given_line)) if last_line else []
    if last_line and (given or answer is None):
        answer = given_line
    elif answer == "" and not _FINAL_ANSWER.search(response):
        return False
    if answer and (same_letters(answer, gold) or lacks_entries(answer, gold)):
        return same_letters(answer, gold)
    if answer and (decided := _decided(answer, gold)) is not None:
        return decided
    if _agree(given or _parsed(response), _parsed_gold(gold)):
        return True
    if not answer:
        return False
    readings = chain(of_a_choice(answer, gold), other_readings(answer, gold))
    if any(_is_answer(part, gold_part) for part, gold_part in readings):
        return True
    parts = alternatives(answer)
    return bool(parts) and all(_is_answer(part, gold) for part in parts)


def _is_answer(answer: str, gold: str) -> bool:
    return same_letters(answer, gold) or (
        not is_changed(answer, gold)
        and _agree(_parsed(f"${with_units(answer)}$"), _parsed_gold(gold))
    )


def _decided(answer: str, gold: str) -> bool | None:
    """The verdict where math-verify would not read all of the answer; None where it would."""
    if vectors := components(answer, gold):
        given, expected = vectors
        return len(given) == len(expected) and all(map(_is_answer, given, expected))
    if (same := same_quantity(answer, gold)) is not None:
        return same
    return False if is_changed(answer, gold) else None


def _gold_text(gold: str) -> str:
    gold = plain_answer(gold)
    last_line = _GSM8K_ANSWER.search(gold)
    return last_line[1] if last_line else gold


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=0)


@lru_cache(maxsize=1024)
def _parsed_gold(gold: str) -> list[Any]:
    """The gold answer as math-verify reads it, whole. Samples of one problem share it."""
    from math_verify import LatexExtractionConfig, parse

    gold = with_units(one_formula(gold))
    # Gold answers of most data sets are bare LaTeX, which math-verify reads only in a formula.
    # From one that it cannot read it would take a number: 4 from "4:30 p.m.".
    if _LATEX.search(gold):
        return _parsed(gold)
    return parse(f"${gold}$", [LatexExtractionConfig()], parsing_timeout=0)


def _agree(given: list[Any], expected: list[Any]) -> bool:
    """Whether math-verify finds one of the expressions or texts equal to an expected one."""
    from math_verify import verify

    return any(
        (verify(right, value, timeout_seconds=0) or _equal_doubles(value, right))
        and not _only_rounded_alike(value, right)
        and not _other_places(value, right)
        for right in expected
        for value in given
    )


def _equal_doubles(given: Any, gold: Any) -> bool:
    """Whether two numbers are equal to a double's digits: 6.02e23 has 602*10^21's.

    math-verify compares six decimals, of which so large a double has none.
    """
    from sympy import Float, UnevaluatedExpr

    if not all(getattr(each, "is_number", False) for each in (given, gold)):
        return False
    if given.has(UnevaluatedExpr) or gold.has(UnevaluatedExpr):  # a per cent
        return False
    if not (given.has(Float) or gold.has(Float)):
        return False
    error, size = ((given / gold - 1).evalf(), gold.evalf()) if gold.is_nonzero else (gold, gold)
    if not (error.is_comparable and size.is_comparable):
        return False
    return bool(abs(size) > _LARGE and abs(error) < _DOUBLE_DIGITS)


def _only_rounded_alike(given: Any, gold: Any) -> bool:
    """Whether two numbers differ that math-verify takes for equal.

    It compares six decimals, in which 2e-9 is 4e-9, and takes what is below 1e-15 for zero. Numbers
    below 0.001 must have six digits in common.
    """
    from sympy import FiniteSet, Interval, Set, Tuple, UnevaluatedExpr
    from sympy.core.relational import Relational

    if isinstance(given, Relational) and isinstance(gold, Relational) and given.lhs != gold.lhs:
        return False
    given, gold = (each.rhs if isinstance(each, Relational) else each for each in (given, gold))
    if given == gold or isinstance(given, str):
        return False
    if given.has(UnevaluatedExpr) or gold.has(UnevaluatedExpr):  # a per cent
        return False
    if getattr(given, "is_number", False) and getattr(gold, "is_number", False):
        return _numbers_differ(given, gold)
    if isinstance(gold, FiniteSet):
        values = given.args if isinstance(given, Set | Tuple) else (given,)
        return any(all(_only_rounded_alike(v, g) for v in values) for g in gold.args)
    if type(given) is type(gold) and isinstance(gold, Tuple | Interval):
        return any(map(_only_rounded_alike, given.args, gold.args))
    return False


def _numbers_differ(given: Any, gold: Any) -> bool:
    if not gold.evalf():
        given, gold = gold, given
    error = abs((given / gold - 1).evalf())
    try:
        tolerance = _DIGITS if abs(gold.evalf()) < _SMALL else _SMALL
        return bool(error.is_comparable and error > tolerance)
    except TypeError:  # a number that sympy cannot evaluate; math-verify's verdict counts
        return False


def _other_places(given: Any, gold: Any) -> bool:
    """Whether math-verify calls two different lists equal. It compares sorted sets.

    2,1 has other values for the names of x=1,y=2, and 1,2,2 has another number twice than 1,1,2.
    """
    from math_verify import verify
    from sympy import Eq
    from sympy.core.relational import Relational

    values, expected = _entries(given), _entries(gold)
    if len(values) < 2 or len(expected) < 2:
        return False
    names = {each.lhs for each in expected if isinstance(each, Eq)}
    if len(names) == len(expected) == len(values):
        pairs = zip(expected, values, strict=True)
        return not any(isinstance(value, Relational) for value in values) and not all(
            verify(each, value, timeout_seconds=0) for each, value in pairs
        )
    return len(set(expected)) < len(expected) and any(
        sum(verify(each, value, timeout_seconds=0) for value in values) != expected.count(each)
        for each in expected
    )


def _entries(value: Any) -> list[Any]:
    """The entries of a list, a set or a pair, in the order in which they are written."""
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(value, Interval):
        return [value.start, value.end]
    if isinstance(value, FiniteSet):
        return list(getattr(value, "_unsorted_args", value.args))
    return list(value.args) if isinstance(value, Tuple) else []


_users: dict[str, Callable[..., Any]] = {}  # the user's functions, in a process that has some


def start_worker(rewards: Mapping[str, UserFunction | None]) -> None:
    """Import and warm up before the first item's time limit starts.

    `rewards` holds the user's functions by name; None where a response is compared with its answer.
    """
    functions = {name: function for name, function in rewards.items() if function}
    compares = None in rewards.values()
    # Two forms of one number: equal texts would not load the parser, which takes seconds.
    warm_up = partial(is_right, r"\boxed{\frac{1}{2}}", "0.5") if compares else lambda: None
    _users.update(start_user_code(functions, _MEMORY_GIB, warm_up))


def rewarded(
    reward: str, columns: Mapping[str, Any], response: str, orphan_seconds: float
) -> Reward | tuple[str, str]:
    """The user's reward; else "crash" or "invalid", and why.

    An error that is not an Exception, and a lack of memory, end the process.
    """
    signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
    try:
        value = _users[reward](dict(columns), response)
        expected = "a finite number, or a tuple of one and a text"
        return as_reward(value) or ("invalid", f"{value!r:.200} is not {expected}")
    except MemoryError:
        os._exit(1)
    except Exception as error:  # the user's code may raise anything
        return "crash", f"{type(error).__name__}: {error!s:.300}"
    except BaseException:
        os._exit(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def graded(response: str, gold: str, orphan_seconds: float) -> bool:
    """`is_right`; the process ends with the first error, and its memory with it.

    After `orphan_seconds` an alarm ends the process, in C code too: its owner, which keeps the time
    limit, must be gone.
    """
    signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
    try:
        return is_right(response, gold)
    except BaseException:
        os._exit(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
