"""The order and the division of the kept rows."""

import pytest

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation.split import KeptTable, shuffled, split_rows
from stable_opd_mcore.preparation.spool import KeptRow


def table_of(keys):
    table = KeptTable()
    for number, key in enumerate(keys):
        table.extend(number % 3, [KeptRow(f"{key:016x}", 10 * number, 9, number, 2 * number)])
    return table


def test_the_split_is_seeded_exact_and_disjoint_by_problem():
    keys = [i // 2 if i < 20 else i for i in range(100)]
    table = table_of(keys)
    assert table.num_repeated == 10
    order = shuffled(table, seed=0)
    assert sorted(order) == list(range(100))
    assert order != sorted(order)
    assert order != shuffled(table, seed=1)
    sft, opd = split_rows(table, order, 70)
    assert len(sft) == 70
    assert sorted(sft + opd) == list(range(100))
    assert not {keys[row] for row in sft} & {keys[row] for row in opd}
    with pytest.raises(DataError, match=r"100 rows are kept.*lower --sft-rows below 100"):
        split_rows(table, order, 100)


def test_a_group_that_does_not_fit_goes_to_the_second_part():
    sft, opd = split_rows(table_of([1, 1, 1, 2]), [0, 1, 2, 3], 2)
    assert (sft, opd) == ([3], [0, 1, 2])


def test_the_order_of_a_problem_does_not_depend_on_other_rows():
    few, many = table_of([5, 6, 7, 8]), table_of([5, 1, 6, 2, 7, 3, 8])
    order = [many.keys[row] for row in shuffled(many, seed=3)]
    assert [key for key in order if key >= 5] == [few.keys[row] for row in shuffled(few, seed=3)]


def test_the_table_keeps_all_columns():
    table = table_of([7, 8])
    assert (list(table.parts), list(table.offsets), list(table.lengths)) == (
        [0, 1],
        [0, 10],
        [9, 9],
    )
    assert (list(table.problem_tokens), list(table.solution_tokens)) == ([0, 1], [0, 2])
