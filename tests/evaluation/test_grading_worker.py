"""The grading process: its verdicts, SIGTERM, its alarm, and the end of its owner."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import psutil
import pytest
from pebble import ProcessExpired, ProcessPool

from stable_opd_mcore.evaluation.grading_worker import graded, is_right, start_worker
from tests.real_data import real_data

ENDLESS = r"\boxed{9^{9^{9^{9}}}+1}"


FORMULAS = [
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", True),  # bare LaTeX is read as a formula
    (r"\boxed{0.5}", r"$\frac{1}{2}$", True),
    (r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", True),
    (r"\boxed{4}", "3", False),
    (r"\boxed{}", "3", False),
    (r"\boxed{3}", "", False),
    ("1/3 of $9\n#### 3", "3", True),
    ("1/3 of $9\n#### 3", "1/3", False),
    ("#### Result\n\\boxed{3}\n#### as shown", "3", True),  # a heading is not an answer
    (r"\boxed{1450}", "x=2 so x*725 = $3\n#### 1,450", True),
    (r"\boxed{4.5 \times 10^{33}}", "4.5e33", True),  # scientific notation, not Euler's e
    (r"\boxed{10^{-8} \text{ Farads}}", "1e-8", True),
    (r"\boxed{-1.87E+6}.", "-1870000", True),
    ("so\n#### 0.00001", str(1e-5), True),
    ("The answer is 2e3", "2000", True),
    (r"\boxed{2000}", "2e4", False),
    (r"\boxed{2e\cdot x}", "2ex", True),
    (r"\boxed{1e9999}", "1e9999", True),  # not evaluated
    (r"\boxed{10\,000}", "10000", True),  # a thin space of thousands, not a product
    (r"\boxed{1~234\ 567.5}", r"1{,}234{,}567.5", True),
    (r"\boxed{20\,000}", r"10\,000", False),
    (r"\boxed{10\,000}", "0", False),
]


def test_answers_are_compared_as_formulas():
    for response, gold, expected in FORMULAS:
        assert is_right(response, gold) is expected, (response, gold)


def test_the_answer_after_the_hashes_of_gsm8k_s_own_solutions_is_theirs():
    """Rows whose solutions math-verify reads otherwise, and every hundredth."""
    lines = real_data("gsm8k/test.jsonl").read_text().splitlines()
    for line in [*(lines[k] for k in (226, 258, 876, 1303)), *lines[::100]]:
        solution = json.loads(line)["answer"]
        answer = solution.partition("####")[2].strip()
        assert is_right(solution, answer), solution
        assert is_right(f"\\boxed{{{answer}}}", solution), solution
        assert not is_right(solution, answer + "1"), solution


def test_a_worker_survives_sigterm_and_an_alarm_ends_it_in_an_endless_item():
    context = multiprocessing.get_context("spawn")
    with ProcessPool(1, initializer=start_worker, initargs=({},), context=context) as pool:
        pid = pool.schedule(os.getpid).result()
        os.kill(pid, signal.SIGTERM)
        assert pool.schedule(graded, (r"\boxed{7}", "7", 60)).result() is True
        assert pool.schedule(graded, ("\\boxed{8} \ud800", "7", 60)).result() is False
        assert pool.schedule(os.getpid).result() == pid
        with pytest.raises(ProcessExpired) as ended:
            pool.schedule(graded, (ENDLESS, "7", 0.5)).result()
        assert ended.value.exitcode == -signal.SIGALRM


def test_idle_workers_end_with_their_owner():
    script = (
        "import os, time; from stable_opd_mcore.evaluation.grading import Grader, GradingItem\n"
        "grader = Grader(); list(grader.grade([GradingItem('1', '1')]))\n"
        "print(grader._pool.schedule(os.getpid).result(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    assert psutil.wait_procs([worker], timeout=20)[1] == []
