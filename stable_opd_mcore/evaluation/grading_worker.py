"""The process that runs math-verify, one item at a time, until its input ends.

Run as a file by grading.Grader: standard library and math-verify only, so that it starts fast and
inherits nothing of a distributed run. Reads JSON lines [response, gold], answers "true" or "false".
It keeps no time for its parent; an alarm ends it only when nobody is left to.
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
# A response that loops on empty boxes holds thousands, and math-verify fails on each, slowly.
_EMPTY_BOX = re.compile(r"\\boxed\{\s*\}")
_LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")


def judge(response: str, gold: str) -> bool:
    """Whether math-verify finds the gold answer in the response, with its default extraction.

    Its own timeouts are off: they are signals that C code ignores, and the parent keeps the time.
    """
    from math_verify import parse, verify

    # Golds of most data sets are bare LaTeX, which math-verify reads only inside a formula.
    formula = gold if _LATEX.search(gold) else f"${gold}$"
    answer = _EMPTY_BOX.sub("", response)
    expected, found = (parse(text, parsing_timeout=0) for text in (formula, answer))
    return bool(expected) and bool(verify(expected, found, timeout_seconds=0))


def serve(orphan_seconds: float) -> None:
    """Answer items until standard input ends.

    Slurm sends SIGTERM to every process of a step, and the trainer then wants to finish its step.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Libraries that print must not disturb the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    judge("\\boxed{1}", "1")  # import and warm up before the first item's time runs
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print(READY, file=answers)
    for line in sys.stdin:
        response, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
        verdict = judge(response, gold)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=answers)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
