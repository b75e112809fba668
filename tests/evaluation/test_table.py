"""The tables and plain values of evaluations whose counts are known."""

import pytest

from stable_opd_mcore.evaluation.published import COLUMNS, PUBLISHED
from stable_opd_mcore.evaluation.results import BenchmarkResult
from stable_opd_mcore.evaluation.table import average, latex, markdown, plain_values, results_table

AIME, AMC = BenchmarkResult(4, (4, 2, 0, 2)), BenchmarkResult(4, (4, 0), num_over_long=1)
HEALTH = {"truncation_rate": 0.25, "repetition_rate": 0.5, "response_length_mean": 10.0}
BOTH = {"aime24": AIME, "amc": AMC}


def test_a_table_of_several_evaluations_ends_with_their_mean_accuracy():
    """The mean is of evaluations: the one with more problems has no more weight."""
    lines = results_table(BOTH, {"aime24": HEALTH, "amc": {}}).splitlines()
    head = "problems    k  accuracy  95 % interval    pass@k  truncated  repetitive  tokens"
    assert lines[0].strip() == head
    assert lines[1].split() == (
        ["aime24", "4", "4", "0.500", "0.125", "to", "0.875", "0.750", "0.250", "0.500", "10"]
    )
    assert lines[2].split()[-3:] == ["-", "-", "-"]
    assert lines[3].split()[:2] == ["average", "0.500"]
    assert len({line.index("0.") for line in lines[1:]}) == 1
    assert len(results_table({"amc": AMC}, {"amc": HEALTH}).splitlines()) == 2


def test_plain_values_hold_every_pass_at_k():
    values = plain_values(AIME)
    assert values["accuracy"] == 0.5
    assert (values["accuracy_low"], values["accuracy_high"]) == (0.125, 0.875)
    assert values["pass_at"] == pytest.approx(
        {"1": 0.5, "2": (1 + 5 / 6 + 0 + 5 / 6) / 4, "4": 0.75}
    )
    assert values["pass_at"].keys() == values["pass_at_interval"].keys()
    assert plain_values(BenchmarkResult(1, (1, 0)))["pass_at"] == {"1": 0.5}
    assert plain_values(AMC)["num_over_long"] == 1


def test_the_papers_layout_with_the_published_rows():
    six = dict.fromkeys(COLUMNS, AIME) | {"minerva": BenchmarkResult(1, (1, 1, 1, 1))}
    page = markdown("a_b step 8", ["weights: x"], six, dict.fromkeys(six, HEALTH))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if "|" in line
    ]
    assert rows[0] == ["", *COLUMNS.values(), "Avg", "source"]
    mean, (low, high) = average(six)
    assert rows[2][0] == "**a_b step 8**"
    assert rows[2][2] == "100.0 [100.0, 100.0]"
    assert rows[2][-2] == f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    assert {len(row) for row in rows[: 3 + len(PUBLISHED)]} == {9}
    assert ["84.6", "43.4", "49.3", "58.1", "24.7", "25.2", "47.6"] in [row[1:-1] for row in rows]

    source = latex("a_b step 8", six)
    body = [line for line in source.splitlines() if line.endswith(r"\\")]
    assert len(body) == 2 + len(PUBLISHED)
    assert {line.count("&") for line in body} == {7}
    assert body[1] == r"a\_b step 8 & 50.0 & 100.0 & 50.0 & 50.0 & 50.0 & 50.0 & 58.3 \\"


def test_a_part_of_the_benchmarks_has_no_average_beside_the_papers():
    page = markdown("x", [], BOTH, dict.fromkeys(BOTH, HEALTH))
    ours = next(line for line in page.splitlines() if line.startswith("| **x**"))
    assert ours.count("--") == 5
