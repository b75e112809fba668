"""The selection of OpenR1-Math-220k's rows."""

import json

import pytest

from stable_opd_mcore.data.openr1 import select_rows, split_rows
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import DataError
from tests.real_data import real_data


def record(**changes):
    return {
        "problem": "1+1?",
        "answer": "2",
        "question_type": "math-word-problem",
        "generations": ["a a a", "b b", "c", "d d"],
        "correctness_math_verify": [True, True, False, True],
        "is_reasoning_complete": [True, True, True, False],
        "correctness_llama": None,
        "finish_reasons": None,
        **changes,
    }


def select(*records, max_tokens=3):
    return select_rows(enumerate(records), lambda text: len(text.split()), max_tokens)


def test_the_shortest_correct_and_complete_generation_wins():
    selection = select(record())
    assert selection.dropped == {}
    assert selection.rows == (Row("openr1:0", "1+1?", "2", "b b"),)


def test_truncated_generations_are_not_used():
    reasons = ["stop", "length", "stop", "stop"]
    assert select(record(finish_reasons=reasons)).rows[0].solution == "a a a"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answer": ""}, "empty answer"),
        ({"answer": None}, "empty answer"),
        ({"answer": "Proof"}, "proof"),
        ({"question_type": "proof"}, "proof"),
        ({"correctness_math_verify": [False] * 4}, "no correct and complete generation"),
        ({"correctness_math_verify": None}, "no correct and complete generation"),
        ({"is_reasoning_complete": None}, "no correct and complete generation"),
        ({"generations": ["x x x x"] * 4}, "longer than 3 tokens"),
    ],
)
def test_dropped_rows_are_counted_by_reason(changes, reason):
    selection = select(record(), record(**changes), record(**changes))
    assert len(selection.rows) == 1
    assert selection.dropped == {reason: 2}


def test_a_real_row():
    row = json.loads(real_data("openr1/row0_truncated.json").read_text())
    selection = select(row, max_tokens=8192)
    assert selection.rows[0].solution == row["generations"][0]
    features = json.loads(real_data("openr1/schema.json").read_text())["features"]
    assert set(row) == set(features)


def test_broken_records_are_named():
    with pytest.raises(DataError, match="openr1:0: no column 'generations'"):
        select({"problem": "x", "answer": "1"})
    with pytest.raises(DataError, match="openr1:0: 1 values of 'correctness_math_verify' for 4"):
        select(record(correctness_math_verify=[True]))
    for changes in (
        {"answer": 2},
        {"problem": ["x"]},
        {"generations": "text"},
        {"is_reasoning_complete": 4},
        {"finish_reasons": ["stop"]},
    ):
        with pytest.raises(DataError, match=rf"openr1:0: .*{next(iter(changes))}"):
            select(record(**changes))


def test_split_is_seeded_exact_and_disjoint_by_problem():
    rows = [Row(f"r:{i}", f"problem {i // 2 if i < 20 else i}") for i in range(100)]
    sft, opd = split_rows(rows, 70, seed=0)
    assert len(sft) == 70
    assert len(opd) == 30
    assert not {r.problem for r in sft} & {r.problem for r in opd}
    assert {r.row_id for r in sft + opd} == {r.row_id for r in rows}
    assert split_rows(rows, 70, seed=0) == (sft, opd)
    assert split_rows(rows, 70, seed=1) != (sft, opd)
    with pytest.raises(DataError, match="100 rows cannot be split into 100"):
        split_rows(rows, 100, seed=0)
