"""What the summary reads from a metrics.jsonl written by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stable_opd_mcore.demo.recipe import Job
from stable_opd_mcore.demo.run import summary_table
from stable_opd_mcore.demo.summary import summarise


def job_with_rows(directory: Path, rows: list[dict]) -> Job:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Job(name="a", directory=directory, act="collapse", arm="opd", seed=3)


def evaluated(accuracy: float, greedy: float) -> dict:
    return {
        "eval/accuracy": accuracy,
        "eval_greedy/accuracy": greedy,
        "eval/truncation_rate": 0.5,
        "eval/repetition_rate": 0.25,
    }


def test_an_arm_with_rollouts(tmp_path):
    truncation = [0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0]
    repetition = [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5]
    rows = [{"step": 0, **evaluated(0.25, 0.9)}]
    rows += [
        {"step": step, "rollout/truncation_rate": t, "rollout/repetition_rate": r}
        for step, (t, r) in enumerate(zip(truncation, repetition, strict=True), start=1)
    ]
    rows[1] |= evaluated(0.1, 0.9)  # before the peak: not its lowest afterwards
    rows[2] |= evaluated(0.5, 0.9)
    rows[5] |= evaluated(0.125, 0.1)
    rows[7] |= evaluated(0.375, 0.6)
    summary = summarise(job_with_rows(tmp_path, rows))
    assert (summary.act, summary.arm, summary.seed) == ("collapse", "opd", 3)
    assert summary.initial_accuracy == 0.25
    assert summary.peak_accuracy == 0.5
    assert summary.lowest_accuracy_after_peak == 0.125
    assert summary.final_accuracy == 0.375
    # Five-step windows: truncation .5, .7, .7; repetition .1, .2, .3.
    assert summary.max_truncation_rate == pytest.approx(0.7)
    assert summary.final_truncation_rate == pytest.approx(0.7)
    assert summary.max_repetition_rate == pytest.approx(0.3)
    assert summary.final_repetition_rate == pytest.approx(0.3)
    assert (summary.greedy_initial_accuracy, summary.greedy_final_accuracy) == (0.9, 0.6)


def test_an_arm_without_rollouts_is_read_from_its_evaluations(tmp_path):
    first, last = evaluated(0.25, 0.9), evaluated(0.75, 0.8)
    last |= {"eval/truncation_rate": 0.125, "eval/repetition_rate": 0.0}
    rows = [{"step": 0, **first}, {"step": 1, "rollout/truncation_rate": None}, {"step": 2, **last}]
    summary = summarise(job_with_rows(tmp_path, rows))
    assert summary.max_truncation_rate == 0.5
    assert summary.final_truncation_rate == 0.125
    assert summary.final_repetition_rate == 0.0
    assert summary.lowest_accuracy_after_peak == summary.final_accuracy == 0.75


def test_the_table_fits_80_columns_with_full_names(tmp_path):
    rows = [{"step": step, **evaluated(0.5, 0.5)} for step in range(2)]
    summary = summarise(job_with_rows(tmp_path, rows))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table("stop_mismatch", [replace(summary, arm="opd_stop_class")]))
    text = console.export_text()
    assert "opd_stop_class" in text
    assert "…" not in text
