"""Benchmark problems are found in training problems, whatever their layout; others are not."""

import json

import pytest

from stable_opd_mcore.data.decontamination import (
    BenchmarkIndex,
    problem_key,
    problem_words,
)
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from tests.real_data import real_data

LONG = (
    "Every morning Aya goes for a $9$-kilometer-long walk and stops at a coffee shop afterwards. "
    "When she walks at $s$ kilometers per hour, the walk takes her $\\frac{1}{2}$ of a day."
)
MIDDLE = "What is the sum of all positive divisors of $1{,}200$?"  # 10 words
SHORT = "Compute $\\sin 60^\\circ$."  # 4 words


@pytest.fixture(scope="module")
def index():
    texts = [LONG, MIDDLE, SHORT]
    return BenchmarkIndex({"bench": [Row(f"r:{i}", text) for i, text in enumerate(texts)]})


def find(index, problem):
    match = index.find(problem)
    return match and (match.benchmark, match.row_id, match.kind)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (0, LONG),
        (0, LONG.upper().replace(" ", "\n ").replace("\\FRAC", "\\dfrac")),
        (0, LONG.replace("$", "").replace("\\frac{1}{2}", "\\tfrac12").rstrip(".")),
        (0, LONG.replace("Aya", "A\u200bya")),
        (1, "what is the sum of all positive divisors of \\(1200\\)"),
        (2, "\\text{Compute} \\( \\sin\\,60^{\\circ} \\)"),
    ],
)
def test_equal_problems_in_another_layout(index, row, problem):
    assert find(index, problem) == ("bench", f"r:{row}", "exact")


def test_thirteen_words_in_a_row_are_found_and_twelve_are_not(index):
    words = problem_words(LONG)
    for start in range(len(words) - 12):
        part = words[start : start + 13]
        assert find(index, f"Before. {' '.join(part)} After.") == ("bench", "r:0", "13-gram")
        assert index.find(f"Before {' '.join(part)} after").words == " ".join(part)
        assert index.find(f"Before. {' '.join(part[:12])} After.") is None


def test_a_short_problem_is_found_whole_inside_another(index):
    assert find(index, f"7. {MIDDLE} Explain.") == ("bench", "r:1", "whole problem")
    assert index.find(f"7. {MIDDLE.replace('sum', 'product')} Explain.") is None
    assert index.find(f"{SHORT} And its square?") is None  # too short to be found inside


@pytest.mark.parametrize("problem", ["", "$$", "Compute $\\sin 30^\\circ$.", "Walk 9 km."])
def test_other_problems_are_clean(index, problem):
    assert index.find(problem) is None


def test_operators_and_decimal_points_tell_problems_apart():
    keys = [problem_key(f"$2{s}3$") for s in ("+", "-", "/", "^", "*", "=", ".", "|", "!", "<", "")]
    assert len(set(keys)) == len(keys)
    assert problem_key("2 \u2212 3") == problem_key("2-3.")


def test_an_empty_benchmark_matches_nothing():
    assert BenchmarkIndex({}).find("") is None
    assert BenchmarkIndex({"b": [Row("r", "$.$")]}).find("") is None


def test_real_benchmarks_find_themselves_and_nothing_in_gsm8k():
    directory = real_data("eval/amc.jsonl").parent
    benchmarks = {name: load_benchmark(name, directory) for name in BENCHMARKS}
    index = BenchmarkIndex(benchmarks)
    problems = [(name, row) for name, rows in benchmarks.items() for row in rows]
    assert len(problems) == 1590
    for name, row in problems[::5]:
        assert find(index, row.problem) == (name, row.row_id, "exact")
        if len(problem_words(row.problem)) >= 8:
            assert index.find(f"Problem 4: {row.problem}\nReason step by step.") is not None
    gsm8k = real_data("gsm8k/test.jsonl").read_text().splitlines()
    assert not any(index.find(json.loads(line)["question"]) for line in gsm8k)
