"""The tables of evaluations whose counts are known."""

import pytest

from stable_opd_mcore.commands.evaluate.table import COLUMNS, markdown, published, results_table
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS
from stable_opd_mcore.evaluation.results import BenchmarkResult, average

RATES = {"truncation_rate": 0.25, "repetition_rate": 0.5, "response_length_mean": 10.0}
AIME = BenchmarkResult(4, (4, 2, 0, 2), rates=RATES)
AMC = BenchmarkResult(4, (4, 0), num_over_long=1)
BOTH = {"aime24": AIME, "amc": AMC}


def rows_of(table: str) -> list[list[str]]:
    lines = [line.split("|")[1:-1] for line in table.splitlines() if "|" in line]
    return [[cell.strip() for cell in line] for line in lines]


def test_a_table_of_several_evaluations_ends_with_their_mean_accuracy():
    """The mean is of evaluations: the one with more problems has no more weight."""
    table = results_table(BOTH)
    assert len({len(line) for line in table.splitlines()}) == 1
    _, _, first, second, last = rows_of(table)
    assert first[:5] == ["aime24", "4", "0", "4", "50.0 [12.5, 87.5]"]
    assert first[5].startswith("75.0 [")
    assert first[6:] == ["25.0", "50.0", "10"]
    assert (second[2], second[6:]) == ("1", ["-", "-", "-"])
    assert (last[0], last[4][:6]) == ("average", "50.0 [")
    assert len(rows_of(results_table({"amc": AMC}))) == 3


def test_the_papers_layout_with_the_published_rows():
    six = dict.fromkeys(COLUMNS, AIME) | {"minerva": BenchmarkResult(1, (1, 1, 1, 1))}
    rows = rows_of(markdown("a_b step 8", ["weights: x"], six))
    assert rows[0] == ["", *COLUMNS.values(), "Avg", "source"]
    mean, (low, high) = average(six)
    assert rows[2][0] == "**a_b step 8**"
    assert rows[2][2] == "100.0 [100.0, 100.0]"
    assert rows[2][-2] == f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    assert {len(row) for row in rows[: 3 + len(published())]} == {9}
    assert ["84.6", "43.4", "49.3", "58.1", "24.7", "25.2", "47.6"] in [row[1:-1] for row in rows]
    assert rows_of(markdown("x", [], BOTH))[2].count("--") == 5  # four benchmarks, the average


def test_an_average_is_that_of_its_scores():
    for row in (row for row in published() if "scores" in row):
        assert len(row["scores"]) == len(COLUMNS), row
        assert sum(row["scores"]) / len(COLUMNS) == pytest.approx(row["average"], abs=0.06), row


def test_the_columns_are_the_benchmarks_and_no_row_is_there_twice():
    assert COLUMNS.keys() == BENCHMARKS.keys()
    assert len({(row["student"], row["method"]) for row in published()}) == len(published())
