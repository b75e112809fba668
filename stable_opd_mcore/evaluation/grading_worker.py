"""What a grading process does: math-verify's judgement of one response, or the user's.

Imports the standard library and what judges only, so that a worker starts fast and holds nothing of
a distributed run. Not here: the pool of workers and an item's time limit (grading.py).
"""

import functools
import gc
import logging
import os
import re
import resource
import signal
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from stable_opd_mcore.host.user_code import UserFunction

_MEMORY_BYTES = 4 * 2**30
_LOADING_SECONDS = 60
# A looping response may hold thousands of empty boxes, and math-verify is slow on each.
_EMPTY_BOX = re.compile(r"\\boxed\{\s*\}")
_LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")
_GSM8K_ANSWER = re.compile(r"(?:\A|\n)####[ \t]*([^\n]+?)\s*\Z")
# At most three digits of exponent, as of a double: 10^999999999 would fill the memory.
_SCIENTIFIC = re.compile(r"(?<![\w\\.])(\d+(?:\.\d*)?)[eE]([-+]?\d{1,3})(?!\w|\.\d)")
_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")  # of 10\,000


def is_right(response: str, gold: str) -> bool:
    """Whether math-verify finds the gold answer in the response, with its default extraction.

    Of a response that ends in GSM8K's "#### answer" that answer counts alone. math-verify's own
    timeouts are off: they are signals, which do not interrupt C code.
    """
    from math_verify import parse, verify

    expected = _parsed_gold(gold)
    response = _readable(response)
    last_line = _GSM8K_ANSWER.search(response)
    given = parse(last_line[1], parsing_timeout=0) if last_line else []
    given = given or parse(_EMPTY_BOX.sub("", response), parsing_timeout=0)
    return bool(expected) and bool(verify(expected, given, timeout_seconds=0))


@functools.lru_cache(maxsize=1024)
def _parsed_gold(gold: str) -> list[Any]:
    """The gold answer as math-verify reads it. Samples of one problem share it."""
    from math_verify import parse

    gold = _readable(gold)
    last_line = _GSM8K_ANSWER.search(gold)
    gold = last_line[1] if last_line else gold
    # Gold answers of most data sets are bare LaTeX, which math-verify reads only in a formula.
    return parse(gold if _LATEX.search(gold) else f"${gold}$", parsing_timeout=0)


def _readable(text: str) -> str:
    """The text with numbers that math-verify would misread written in another form.

    It reads 4.5e33 as 4.5·e·33, with Euler's e, and 10\\,000 as a product, 10·0.
    """
    text = _THOUSANDS_SPACE.sub("", text)
    return _SCIENTIFIC.sub(lambda found: f"{found[1]}*10^({int(found[2])})", text)


_users: dict[str, Callable[..., Any]] = {}  # the user's functions, in a process that has some


def start_worker(rewards: Mapping[str, UserFunction | None]) -> None:
    """Import and warm up before the first item's time limit starts.

    SIGTERM is ignored: Slurm sends it to every process of a job step, and the trainer still
    finishes its training step.

    Args:
        rewards: the user's functions by name; None where a response is compared with its answer.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if None in rewards.values():
        is_right("\\boxed{1}", "1")
    signal.setitimer(signal.ITIMER_REAL, _LOADING_SECONDS)  # it ends the process
    _users.update({name: function.load() for name, function in rewards.items() if function})
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.freeze()  # collections need not visit sympy's 80,000 objects
    gc.set_threshold(50_000)
    with open(os.devnull, "wb") as null:  # what libraries print is of no use to anyone
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def rewarded(
    reward: str, columns: Mapping[str, Any], response: str, orphan_seconds: float
) -> float | tuple[str, str]:
    """The user's reward in [0, 1]; else "crash" or "invalid", and why.

    What is no Exception, and a lack of memory, ends the process.
    """
    signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
    try:
        value = _users[reward](dict(columns), response)
        if isinstance(value, Real) and 0 <= float(value) <= 1:
            return float(value)
        return "invalid", f"{value!r:.200} is no number in [0, 1]"
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

    Args:
        orphan_seconds: an alarm ends the process after so long, in C code too: its owner, which
            keeps the time limit, must be gone.
    """
    signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
    try:
        return is_right(response, gold)
    except BaseException:
        os._exit(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
