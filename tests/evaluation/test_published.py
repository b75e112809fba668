"""The published rows agree with themselves."""

import pytest

from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS
from stable_opd_mcore.evaluation.published import COLUMNS, PUBLISHED


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.student} {row.method}")
def test_an_average_is_that_of_its_scores(row):
    if row.scores is not None:
        assert len(row.scores) == len(COLUMNS)
        assert sum(row.scores) / len(COLUMNS) == pytest.approx(row.average, abs=0.06)


def test_the_columns_are_the_benchmarks_and_no_row_is_there_twice():
    assert COLUMNS.keys() == BENCHMARKS.keys()
    assert len({(row.student, row.method) for row in PUBLISHED}) == len(PUBLISHED)
