"""The subprocess of grading.Grader: runs math-verify, one item at a time, until its input ends.

Reads JSON lines [response, gold] and writes "true" or "false". It imports the standard library and
math-verify only, so that it starts fast and holds nothing of a distributed run. An alarm ends a
worker whose parent is gone. Not here: the time limit of an item, which the parent keeps.
"""

import functools
import gc
import json
import logging
import os
import re
import resource
import signal
import sys
import warnings
from typing import Any

READY = "ready"
_MEMORY_BYTES = 4 * 2**30
# A looping response may hold thousands of empty boxes, and math-verify is slow on each.
_EMPTY_BOX = re.compile(r"\\boxed\{\s*\}")
_LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")


def is_right(response: str, gold: str) -> bool:
    """Whether math-verify finds the gold answer in the response, with its default extraction.

    math-verify's own timeouts are off: they are signals, which do not interrupt C code.
    """
    from math_verify import parse, verify

    expected = _parsed_gold(gold)
    given = parse(_EMPTY_BOX.sub("", response), parsing_timeout=0)
    return bool(expected) and bool(verify(expected, given, timeout_seconds=0))


@functools.lru_cache(maxsize=1024)
def _parsed_gold(gold: str) -> list[Any]:
    """The gold answer as math-verify reads it. Samples of one problem share it."""
    from math_verify import parse

    # Gold answers of most data sets are bare LaTeX, which math-verify reads only in a formula.
    return parse(gold if _LATEX.search(gold) else f"${gold}$", parsing_timeout=0)


def serve(orphan_seconds: float) -> None:
    """Grade items until standard input ends.

    SIGTERM is ignored: Slurm sends it to every process of a job step, and the trainer still
    finishes its training step.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Libraries print to standard error from here on, so that only verdicts reach the parent.
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    is_right("\\boxed{1}", "1")  # import and warm up before the first item's time limit starts
    gc.freeze()  # collections need not visit sympy's 80,000 objects
    gc.set_threshold(50_000)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print(READY, file=verdicts)
    for line in sys.stdin:
        response, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
        verdict = is_right(response, gold)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=verdicts)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
