"""The summary of a run whose metrics.jsonl is written by hand, and its table."""

from __future__ import annotations

import io
import json

from rich.console import Console

from stable_opd_mcore.demo.recipe import Job
from stable_opd_mcore.demo.run import summary_table
from stable_opd_mcore.demo.summary import summarise


def test_a_record_is_flat_and_the_table_fits_80_columns_with_full_names(tmp_path):
    rows = [
        {"step": step, "eval/accuracy": 0.5, "rollout/truncation_rate": 0.25} for step in (0, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarise(Job("a", tmp_path, act="stop_mismatch", arm="opd_stop_class", seed=3))
    assert list(summary.record())[:4] == ["act", "arm", "seed", "initial_accuracy"]
    assert summary.record()["initial_accuracy"] == 0.5
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table("stop_mismatch", [summary]))
    text = console.export_text()
    assert "opd_stop_class" in text
    assert "…" not in text
