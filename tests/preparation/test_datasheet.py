"""Length statistics and the page for people."""

from stable_opd_mcore.preparation.datasheet import datasheet, length_statistics, lengths_entry


def test_bins_end_with_their_number():
    statistics = length_statistics([1, 2, 2, 3, 100], bins=(2, 3, 50))
    assert statistics["histogram"] == {"2": 3, "3": 1, "50": 0, "more": 1}
    assert (statistics["mean"], statistics["p50"], statistics["max"]) == (21.6, 2, 100)
    assert length_statistics(list(range(1, 101)), bins=())["p95"] == 95
    empty = length_statistics([], bins=(2,))
    assert empty["histogram"] == {"2": 0, "more": 0}
    assert empty["max"] is None


def test_rows_without_a_solution_are_no_solution_of_length_0():
    entry = lengths_entry(problem_tokens=[5, 6], solution_tokens=[0, 300])
    assert entry["rows"] == 2
    assert entry["solution_tokens"]["mean"] == 300


def test_the_page_shows_counts_and_bars():
    page = datasheet(
        {
            "name": "openr1",
            "origin": "somewhere",
            "settings": {"recipe": "openr1"},
            "counts": {"read": 9, "kept": 7, "repeated_problems": 1, "dropped": {"proof": 2}},
            "outputs": {
                "a.jsonl": lengths_entry([30] * 4, [5000] * 4),
                "b.md": {"bytes": 1},
            },
        }
    )
    assert "| dropped: proof | 2 |" in page
    assert "| kept | 7 |" in page
    assert f"  <= 6144        4 {'#' * 40}\n" in page
    assert "solution: mean 5000.0, p50 5000, p95 5000, max 5000" in page
    assert "## b.md" not in page
