"""Tables of known runs: outcomes, settings that differ, benchmarks, tiles, text made printable."""

import json

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.monitoring.tables import (
    MAX_ROWS,
    MISSING,
    Table,
    benchmark_table,
    config_differences,
    described,
    outcome_table,
    tiles,
    verdict,
)
from tests.monitoring.make_run import make_run


def test_outcomes(tmp_path):
    rows = [
        {"step": step, "rollout/truncation_rate": float(step > 5), "eval/accuracy": accuracy}
        for step, accuracy in enumerate([0.25, None, None, 0.75, None, None, 0.5])
    ]
    table = outcome_table([("run", tmp_path / "x", rows)])
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {
        "run": "run",
        "first damage": MISSING,
        "steps": "6",
        "accuracy at start": "0.250",
        "accuracy at peak": "0.750",
        "accuracy at end": "0.500",
        "greedy at end": MISSING,
        "gap recovered": MISSING,
        "truncated at worst": "0.200",
        "truncated at end": "0.200",
        "repetitive at worst": MISSING,
        "repetitive at end": MISSING,
        "length at end": MISSING,
        "tokens per second": MISSING,
    }


def test_the_gap_recovered_needs_the_teachers_accuracy(tmp_path):
    run = make_run(tmp_path / "run", 1, evaluation={"teacher_accuracy": 0.75})
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "eval/accuracy": 0.5}]
    table = outcome_table([("run", run, rows)])
    assert table.rows[0][table.columns.index("gap recovered")] == "0.500"


def test_a_verdict_is_computed():
    rows = [{"step": step, "rollout/truncation_rate": float(step > 30)} for step in range(40)]
    assert verdict(rows[:20]) == MISSING
    assert verdict(rows[:30]) == "none"
    assert verdict(rows) == "step 35: rollout/truncation_rate"


def test_a_long_table_counts_what_it_leaves_out():
    table = Table(["a"])
    for _ in range(MAX_ROWS + 7):
        table.add(["x" * 300])
    assert (len(table.rows), table.left_out) == (MAX_ROWS, 7)
    assert len(table.rows[0][0]) == 201


def test_settings_that_differ_are_listed_by_label_without_run_names(tmp_path):
    plain = make_run(tmp_path / "plain", 1)
    held = [make_run(tmp_path / f"kl-{seed}", 1, beta=0.5) for seed in range(2)]
    runs = [("opd", plain), ("kl", held[0]), ("kl", held[1])]
    table = config_differences(runs)
    assert table.columns == ["setting", "opd", "kl"]
    assert table.rows == [["kl.beta", "0.0", "0.5"]]
    assert config_differences(runs[1:]) is None


def test_benchmarks_of_several_runs_stand_side_by_side(tmp_path):
    for name, accuracy in (("a", 0.25), ("b", 0.5)):
        (tmp_path / name / "evaluation" / "step_000008").mkdir(parents=True)
        values = {"accuracy": accuracy, "accuracy_low": 0.1, "accuracy_high": 0.6}
        values |= {"num_problems": 30, "num_samples": 16, "response_length_mean": 1234.5}
        file = tmp_path / name / "evaluation" / "step_000008" / "results.json"
        file.write_text(json.dumps({"benchmarks": {"aime24": values}}))
    runs = [("run a", tmp_path / "a"), ("none", tmp_path / "c"), ("run b", tmp_path / "b")]
    table = benchmark_table(runs)
    assert [row[:6] for row in table.rows] == [
        ["aime24", "run a, step_000008", "30", "16", "0.250", "0.100 to 0.600"],
        ["aime24", "run b, step_000008", "30", "16", "0.500", "0.100 to 0.600"],
    ]
    assert table.rows[0][6:] == [MISSING, MISSING, "1,234"]
    assert benchmark_table(runs[1:2]) is None
    file.write_text("[1]")
    with pytest.raises(UserError, match=r"b/evaluation/.*/results\.json: expected one mapping"):
        benchmark_table(runs)


def test_the_tiles_of_a_run_say_where_it_stands(tmp_path):
    run = make_run(tmp_path / "run", 1)
    rows = [
        {"step": step, "eval/accuracy": accuracy, "rollout/truncation_rate": 0.25 * (step == 1)}
        for step, accuracy in enumerate([0.25, 0.75, 0.5])
    ]
    tiles_of = {tile["name"]: (tile["value"], tile["note"]) for tile in tiles(run, rows)}
    assert tiles_of["Step"] == ("2", "of 800")
    assert tiles_of["Held-out accuracy"] == ("0.500", "from 0.250, peak 0.750")
    assert tiles_of["Truncated"] == ("0.083", "at worst 0.083")
    assert "Length" not in tiles_of


def test_a_run_is_described_by_what_it_trains(tmp_path):
    assert described(make_run(tmp_path / "run", 1, beta=0.5)) == (
        "opd, \u03b2 = 0.5 \u00b7 student somewhere \u00b7 data synthetic:arithmetic"
    )
    assert described(tmp_path) == "on-policy distillation"


def test_settings_that_are_no_mapping_are_refused_by_file(tmp_path):
    run = make_run(tmp_path / "run", 1)
    (run / "config.resolved.yaml").write_text("- a\n")
    with pytest.raises(UserError, match=r"resolved\.yaml: expected a mapping of settings, found l"):
        config_differences([("a", run)])
    (run / "config.resolved.yaml").unlink()  # a run that died early has none
    assert config_differences([("a", run), ("b", tmp_path / "nothing")]) is None
