"""Tables of known runs: outcomes, settings that differ, sample rollouts, text made printable."""

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.monitoring.tables import (
    MISSING,
    compression,
    config_differences,
    outcome_table,
    printable,
    sample_rollouts,
    table_of_records,
)
from tests.monitoring.make_run import make_run


def test_outcomes(tmp_path):
    rows = [
        {"step": step, "rollout/truncation_rate": float(step > 5), "eval/accuracy": accuracy}
        for step, accuracy in enumerate([0.25, None, None, 0.75, None, None, 0.5])
    ]
    table = outcome_table([("run", tmp_path / "x", rows)])
    assert dict(zip(table["columns"], table["rows"][0], strict=True)) == {
        "run": "run",
        "directory": "x",
        "steps": "6",
        "accuracy at start": "0.250",
        "accuracy at peak": "0.750 @ 3",
        "accuracy at end": "0.500",
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
    assert table["rows"][0][table["columns"].index("gap recovered")] == "0.500"


def test_records_become_a_table():
    table = table_of_records(
        [{"act": "a", "seed": 0, "peak_accuracy": 0.5}, {"act": "b", "x": None}]
    )
    assert table["columns"] == ["act", "seed", "peak accuracy", "x"]
    assert table["texts"] == 1
    assert table["rows"] == [["a", "0", "0.500", MISSING], ["b", MISSING, MISSING, MISSING]]


def test_settings_that_differ_are_listed_by_label_without_run_names(tmp_path):
    plain = make_run(tmp_path / "plain", 1)
    held = [make_run(tmp_path / f"kl-{seed}", 1, beta=0.5) for seed in range(2)]
    runs = [("opd", plain), ("kl", held[0]), ("kl", held[1])]
    table = config_differences(runs)
    assert table["columns"] == ["setting", "opd", "kl"]
    assert table["rows"] == [["kl.beta", "0.0", "0.5"]]
    assert config_differences(runs[1:]) is None


def test_samples_are_the_first_the_last_and_the_most_repetitive(tmp_path):
    run = make_run(tmp_path / "run", 30, collapse_at=10)
    rows = [{"step": 1}, {"step": 2}, {"step": 30, "rollout/repetition_rate": 0.5}]
    first, last, worst = sample_rollouts(run, rows)
    assert "step 1 " in first["facts"]
    assert "step 30 " in last["facts"]
    assert "step 30 " in worst["facts"]
    assert "truncated" in worst["facts"]
    assert worst["response"].endswith("w1;w1;")
    assert sample_rollouts(tmp_path / "elsewhere", rows) == []


def test_a_long_response_keeps_its_head_and_tail(tmp_path):
    run = make_run(tmp_path / "run", 1, text="head " + "x" * 5000 + " tail")
    response = sample_rollouts(run, [{"step": 1}])[0]["response"]
    assert response.startswith("head")
    assert response.endswith("tail")
    assert len(response) < 2500
    assert "2,810 characters" in response


def test_what_cannot_be_printed_is_made_visible():
    assert printable("a\x00\x1b\u202e\ud83d\n\té") == "a␀␛��\n\té"
    assert compression("") == 0.0


def test_a_loop_compresses_more_than_its_first_turn():
    loop = "the same words again; " * 100
    assert compression(loop) > 20
    assert compression(loop[:22]) < 1.5


def test_settings_that_are_no_mapping_are_refused_by_file(tmp_path):
    run = make_run(tmp_path / "run", 1)
    (run / "config.resolved.yaml").write_text("- a\n")
    with pytest.raises(UserError, match=r"resolved\.yaml: expected a mapping of settings, found l"):
        config_differences([("a", run)])
    (run / "config.resolved.yaml").unlink()  # a run that died early has none
    assert config_differences([("a", run), ("b", tmp_path / "nothing")]) is None
