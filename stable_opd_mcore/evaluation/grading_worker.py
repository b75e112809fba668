"""The subprocess of grading.Grader: runs math-verify, one item at a time, until its input ends.

Reads JSON lines [response, gold] and writes "true" or "false". It imports the standard library and
math-verify only, so that it starts fast and holds nothing of a distributed run. An alarm ends a
worker whose parent is gone. Not here: the time limit of an item, which the parent keeps.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
import warnings

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

    # Gold answers of most data sets are bare LaTeX, which math-verify reads only in a formula.
    formula = gold if _LATEX.search(gold) else f"${gold}$"
    answer = _EMPTY_BOX.sub("", response)
    expected, given = (parse(text, parsing_timeout=0) for text in (formula, answer))
    return bool(expected) and bool(verify(expected, given, timeout_seconds=0))


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
