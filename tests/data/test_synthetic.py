"""The arithmetic task: pure in (seed, index), true answers, disjoint splits."""

import re

import pytest

from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.data.synthetic import (
    ArithmeticOptions,
    arithmetic_row,
    arithmetic_rows,
)
from stable_opd_mcore.errors import DataError

FROZEN = ("1-1+1-4-1-3", "1-1=0;0+1=1;1-4=2;2-1=1;1-3=3;[3]")


def true_answer(problem, modulus):
    value, *rest = re.findall(r"\d|[+*-]", problem)
    value = int(value)
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        value = {"+": value + int(operand), "-": value - int(operand), "*": value * int(operand)}[
            operator
        ] % modulus
    return str(value)


def test_answers_and_solutions_are_right_and_ranges_hold():
    rows = arithmetic_rows(
        {"rows": 300, "modulus": 7, "min_operations": 1, "recheck": [0.2]}, "train"
    )
    for row in rows:
        assert row.answer == true_answer(row.problem, 7)
        assert row.answer_format == "bracket"
        steps = [s for s in row.solution.split(";")[:-1] if not s.startswith("w")]
        assert 1 <= len(steps) <= 5
        assert all(s[-1] == true_answer(s[:-2], 7) for s in steps)
        assert row.solution.endswith(f"[{row.answer}]")
    assert any("w" in row.solution for row in rows)


def test_a_row_is_a_function_of_options_split_and_index():
    options = ArithmeticOptions(seed=3, rows=50)
    rows = arithmetic_rows({"seed": 3, "rows": 50}, "train")
    assert arithmetic_row(options, "train", 49) == rows[49]
    assert rows[:20] == arithmetic_rows({"seed": 3, "rows": 50}, "train", limit=20)
    assert rows != arithmetic_rows({"seed": 4, "rows": 50}, "train")
    # A frozen example: rows must not change between versions, finished runs refer to them.
    assert (rows[0].problem, rows[0].solution) == FROZEN


def test_train_and_eval_share_no_problem():
    train = {row.problem for row in arithmetic_rows({"rows": 3000}, "train")}
    held_out = {row.problem for row in arithmetic_rows({"rows": 500, "seed": 1}, "test")}
    assert len(train) > 2500
    assert len(held_out) > 400
    assert not train & held_out


def test_unknown_facts_get_other_results_each_time_and_all_others_are_right():
    rows = arithmetic_rows({"rows": 2000, "unknown": 0.3, "seed": 5}, "train")
    results: dict[str, set[str]] = {}
    for row in rows:
        assert row.answer == true_answer(row.problem, 5)
        for step in row.solution.split(";")[:-1]:
            fact, result = step.split("=")
            results.setdefault(fact, set()).add(result)
    assert len(results) == 3 * 5 * 5
    unknown = {fact for fact, found in results.items() if found != {true_answer(fact, 5)}}
    assert 10 < len(unknown) < 35
    assert all(results[fact] == set("01234") for fact in unknown)


def test_repeated_rechecks_have_the_given_probabilities():
    rows = arithmetic_rows({"rows": 2000, "recheck": [0.5, 0.0]}, "train")
    steps = sum(row.solution.count(";") - row.solution.count("w") for row in rows)
    rechecks = sum(row.solution.count("w") for row in rows)
    assert rechecks / steps == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"rowz": 3}, "rowz.*use rows, seed", {"rows": 3}),
        ({"min_operations": 6}, "exceeds max_operations=5; lower it", {"min_operations": 5}),
        ({"rows": 10**11}, "rows: Input should be less than or equal to 1000000", {"rows": 9}),
        ({"recheck": [0.5, 1.0]}, "from 0 to below 1", {"recheck": [0.5, 0.9]}),
    ],
)
def test_bad_options_are_refused_until_the_remedy(options, message, remedy):
    with pytest.raises(DataError, match=message):
        arithmetic_rows(options, "train")
    assert arithmetic_rows(remedy, "train")


def test_the_task_is_read_as_a_source():
    source = SourceConfig(path="synthetic:arithmetic", split="test", limit=5)
    assert load_rows(source)[4].row_id == "synthetic:arithmetic/test:4"
    with pytest.raises(DataError, match="no such synthetic task"):
        load_rows(SourceConfig(path="synthetic:geometry"))
