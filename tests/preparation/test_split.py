"""The order and the division of the kept rows."""

import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation.split import row_key, shuffled, split_rows


def test_the_split_is_seeded_exact_and_disjoint_by_problem():
    keys = [str(i // 2 if i < 20 else i) for i in range(100)]
    order = shuffled(keys, range(100), seed=0)
    assert sorted(order) == list(range(100))
    assert order != sorted(order)
    assert order != shuffled(keys, range(100), seed=1)
    sft, opd = split_rows(keys, order, 70)
    assert len(sft) == 70
    assert sorted(sft + opd) == list(range(100))
    assert not {keys[row] for row in sft} & {keys[row] for row in opd}
    with pytest.raises(DataError, match=r"100 rows are kept.*lower --sft-rows below 100"):
        split_rows(keys, order, 100)


def test_a_group_that_does_not_fit_goes_to_the_second_part():
    assert split_rows(["1", "1", "1", "2"], [0, 1, 2, 3], 2) == ([3], [0, 1, 2])


def test_the_order_of_a_problem_does_not_depend_on_other_rows():
    few, many = ["5", "6", "7", "8"], ["5", "1", "6", "2", "7", "3", "8"]
    order = [many[row] for row in shuffled(many, range(7), seed=3)]
    assert [key for key in order if key >= "5"] == [few[row] for row in shuffled(few, range(4), 3)]


def test_near_duplicates_share_a_key():
    assert row_key("How many?") == row_key(" HOW  many ") != row_key("How much?")
