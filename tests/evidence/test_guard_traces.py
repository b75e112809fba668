"""The guard over published metrics: which made run gets a measure, and what bad files say."""

import json
import sys
from pathlib import Path

import pytest

from docs.evidence.programs import guard_traces
from stable_opd_mcore.config.guard_settings import GuardConfig
from stable_opd_mcore.errors import DataError

HUMP = [0.02] * 25 + [0.1 * n for n in range(9)] + [0.8] * 10 + [0.1] * 40
CAPPED = [0.02] * 25 + [0.1 * n for n in range(10)] + [1.0] * 50
SMALL = [0.7] * 40 + [1.0] * 40


def trace(arm, rates, unpublished=""):
    return [f"w,{arm},0,{step},{rate},{unpublished}" for step, rate in enumerate(rates, start=1)]


def test_capped_run_gets_measures_and_growth_none(tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "traces.csv", tmp_path / "out.json"
    rows = trace("hump", HUMP) + trace("capped", CAPPED) + trace("small", SMALL, "nan")
    header = "wave,arm,seed,step,truncation_rate,overlap_student_mass"
    file.write_text("\n".join([header, *rows]) + "\n")
    monkeypatch.setattr(sys, "argv", ["guard_traces", str(file), "--json", str(out)])
    guard_traces.main()
    found = {run["arm"]: run for run in json.loads(out.read_text())}
    assert found["hump"].keys() == {
        *("wave", "arm", "seed", "first_warning", "first_damage", "cut", "stopped")
    }
    assert 25 < found["hump"]["first_warning"] < 40
    assert found["hump"]["first_damage"] is None
    assert found["small"]["first_damage"] is None
    above = guard_traces.first_capped(guard_traces.read_traces(file)["w", "capped", "0"])
    assert found["capped"]["first_damage"] == above == 38
    assert found["capped"]["cut"] > 0.9
    assert found["capped"]["stopped"] > 48
    printed = capsys.readouterr().out
    assert "capped: damage in 1 of 1 runs, a stop in 1" in printed
    assert "healed: damage in 0 of 1 runs, a stop in 0" in printed


def test_own_runs_are_replayed_by_directory(tmp_path, monkeypatch, capsys):
    other_data = {"event": "settings_changed", "after_step": 30, "changes": {"data.train": [1, 2]}}
    made = {
        "sound": HUMP,
        "broken": CAPPED,
        "supervised": [None] * 3,
        "harder": [0.0] * 30 + [0.5] * 40,
    }
    for name, rates in made.items():
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "rollout/truncation_rate": rate}
            for step, rate in enumerate(rates, start=1)
        ]
        start = {"step": 0, "eval/accuracy": 0.5}
        if name == "harder":
            rows.insert(30, other_data)
        text = "".join(json.dumps(row) + "\n" for row in [start, *rows])
        (tmp_path / name / "metrics.jsonl").write_text(text)
    runs = [str(tmp_path / name) for name in made]
    monkeypatch.setattr(sys, "argv", ["guard_traces", *runs])
    guard_traces.main()
    printed, said = capsys.readouterr()
    assert "capped: damage in 1 of 1 runs, a stop in 1" in printed
    assert "healed: damage in 0 of 1 runs, a stop in 0" in printed
    assert "between: damage in 0 of 1 runs, a stop in 0" in printed
    assert said == f"{runs[2]}: no rollouts, not replayed\n"
    csv_and_run = ["guard_traces", str(tmp_path / "traces.csv"), *runs]
    monkeypatch.setattr(sys, "argv", csv_and_run)
    with pytest.raises(SystemExit):
        guard_traces.main()
    assert "one CSV file, or directories of runs" in capsys.readouterr().err


def test_damage_in_the_demo_is_found_while_most_responses_end():
    """The stored runs are those of seed 0: plain OPD, OPD with golden solutions, and Stable-OPD."""
    runs = guard_traces.read_traces(Path(__file__).with_name("demo_seed0.csv"))
    act = GuardConfig(policy="act")
    found = {key[1]: guard_traces.replay(key, rows, act) for key, rows in runs.items()}
    assert [(found[arm].first_damage, found[arm].cut) for arm in found] == [
        (47, pytest.approx(0.14, abs=0.005)),
        (72, pytest.approx(0.17, abs=0.005)),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wave,arm,seed,step\na,b,c,1\n", "no column truncation_rate"),
        ("wave,arm,seed,step,truncation_rate\na,b,c,1,high\n", "traces.csv:2"),
    ],
)
def test_bad_file_is_named(tmp_path, text, said):
    file = tmp_path / "traces.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        guard_traces.read_traces(file)
