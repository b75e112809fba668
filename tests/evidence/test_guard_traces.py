"""The guard over published metrics: which made run gets a measure, and what bad files say."""

import json
import sys

import pytest

from docs.evidence.programs import guard_traces
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
        *("wave", "arm", "seed", "first_warning", "first_measure", "stopped")
    }
    assert 25 < found["hump"]["first_warning"] < 40
    assert found["hump"]["first_measure"] is None
    assert found["small"]["first_measure"] is None
    above = guard_traces.first_capped(guard_traces.read_traces(file)["w", "capped", "0"])
    assert found["capped"]["first_measure"] == above == 38
    assert found["capped"]["stopped"] > 48
    printed = capsys.readouterr().out
    assert "capped: a measure in 1 of 1 runs, a stop in 1" in printed
    assert "healed: a measure in 0 of 1 runs, a stop in 0" in printed


def test_own_runs_are_replayed_by_directory(tmp_path, monkeypatch, capsys):
    for name, rates in (("sound", HUMP), ("broken", CAPPED), ("supervised", [None] * 3)):
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "rollout/truncation_rate": rate}
            for step, rate in enumerate(rates, start=1)
        ]
        start = {"step": 0, "eval/accuracy": 0.5}
        text = "".join(json.dumps(row) + "\n" for row in [start, *rows])
        (tmp_path / name / "metrics.jsonl").write_text(text)
    runs = [str(tmp_path / name) for name in ("sound", "broken", "supervised")]
    monkeypatch.setattr(sys, "argv", ["guard_traces", *runs])
    guard_traces.main()
    printed, said = capsys.readouterr()
    assert "capped: a measure in 1 of 1 runs, a stop in 1" in printed
    assert "healed: a measure in 0 of 1 runs, a stop in 0" in printed
    assert said == f"{runs[-1]}: no rollouts, not replayed\n"
    csv_and_run = ["guard_traces", str(tmp_path / "traces.csv"), *runs]
    monkeypatch.setattr(sys, "argv", csv_and_run)
    with pytest.raises(SystemExit):
        guard_traces.main()
    assert "one CSV file, or directories of runs" in capsys.readouterr().err


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
