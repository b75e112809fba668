"""The grading process by itself: its replies, SIGTERM, the end of its input, and its alarm."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest

from stable_opd_mcore.evaluation import grading_worker
from stable_opd_mcore.evaluation.grading_worker import READY, is_right

ENDLESS = r"\boxed{9^{9^{9^{9}}}+1}"


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", True),  # bare LaTeX is read as a formula
        (r"\boxed{0.5}", r"$\frac{1}{2}$", True),
        (r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", True),
        (r"\boxed{3} or \boxed{}", "3", True),
        (r"\boxed{4}", "3", False),
        (r"\boxed{}", "3", False),
        (r"\boxed{3}", "", False),
    ],
)
def test_answers_are_compared_as_formulas(response, gold, expected):
    assert is_right(response, gold) is expected


@contextlib.contextmanager
def worker(orphan_seconds: float):
    command = [sys.executable, grading_worker.__file__, str(orphan_seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == f"{READY}\n"
        try:
            yield process
        finally:
            process.kill()


def ask(process, response: str, gold: str) -> None:
    process.stdin.write(json.dumps([response, gold]) + "\n")
    process.stdin.flush()


def test_a_worker_survives_sigterm_and_ends_with_its_input():
    with worker(60) as process:
        process.send_signal(signal.SIGTERM)
        for response, verdict in ((r"\boxed{7}", "true"), ("\\boxed{8} \ud800", "false")):
            ask(process, response, "7")
            assert process.stdout.readline() == f"{verdict}\n"
        rest, errors = process.communicate(timeout=30)
        assert (rest, errors, process.returncode) == ("", "", 0)


def test_a_worker_may_wait_for_its_next_item_longer_than_one_may_take():
    with worker(1.0) as process:
        ask(process, r"\boxed{7}", "7")
        assert process.stdout.readline() == "true\n"
        time.sleep(1.2)
        ask(process, r"\boxed{8}", "7")
        assert process.stdout.readline() == "false\n"


def test_a_worker_whose_parent_is_gone_ends_in_an_endless_item():
    """No parent keeps a time limit here; the alarm ends the process."""
    with worker(0.3) as process:
        ask(process, ENDLESS, "7")
        assert process.wait(timeout=60) == -signal.SIGALRM
