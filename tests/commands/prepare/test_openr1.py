"""The selection of OpenR1-Math-220k's rows; test_prepare.py has a row of every reason."""

import json

import pytest

from stable_opd_mcore.commands.prepare.openr1 import COLUMNS, Candidate, read_openr1
from stable_opd_mcore.errors import DataError
from tests.commands.prepare.make_inputs import SCHEMA
from tests.real_data import real_data


def record(**changes):
    return {
        "problem": "1+1?",
        "answer": "2",
        "question_type": "math-word-problem",
        "generations": ["a a a", "b b", "c", "d d"],
        "correctness_math_verify": [True, True, False, True],
        "is_reasoning_complete": [True, True, True, False],
        **changes,
    }


def test_a_real_row():
    row = json.loads(real_data("openr1/row0_truncated.json").read_text())
    problem, offered = read_openr1(row, "row")
    assert isinstance(offered, Candidate)
    assert offered.solutions[0] == row["generations"][0]
    assert problem == offered.problem
    features = json.loads(real_data("openr1/schema.json").read_text())["features"]
    assert set(row) == set(features) == set(SCHEMA.names)
    assert set(COLUMNS) <= set(features)


@pytest.mark.parametrize(
    "changes",
    [
        {"answer": 2},
        {"generations": [None] * 4},
        {"correctness_math_verify": ["True", "True", "False", "True"]},
        {"is_reasoning_complete": [float("nan")] * 4},
        {"finish_reasons": [1] * 4},
        {"is_reasoning_complete": 4},
        {"finish_reasons": ["stop"]},
        {"correctness_math_verify": [True]},
    ],
)
def test_broken_records_are_named(changes):
    with pytest.raises(DataError, match=rf"file:7: .*{next(iter(changes))}"):
        read_openr1(record(**changes), "file:7")
