"""The whole demonstration with a few steps a run: files, table, resumption, failures."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stable_opd_mcore.demo import run
from stable_opd_mcore.demo.recipe import Job, demo_jobs
from stable_opd_mcore.demo.summary import ArmSummary

STEPS = 6  # a summary's window is five


def shrunk(job: Job, **sections: Any) -> Job:
    """The same job with few steps, small batches and a small evaluation."""
    if job.config is None:
        return job
    config = json.loads(json.dumps(job.config))
    config["train"]["steps"] = STEPS
    config["rollout"]["prompts_per_step"] = 4
    config["data"]["train"]["options"]["rows"] = 4 * STEPS
    config["evaluation"]["every"] = STEPS if job.arm else 0
    if job.arm:
        config["data"]["eval"]["options"]["rows"] = 8
        config["sampling"]["max_new_tokens"] = 20
    for section, values in sections.items():
        config[section] |= values
    return replace(job, steps=STEPS, config=config)


@pytest.mark.slow
def test_the_demo_end_to_end_and_again(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr(
        run, "demo_jobs", lambda *arguments: [shrunk(job) for job in demo_jobs(*arguments)]
    )
    run.run_demo(tmp_path, 1)
    captured = capfd.readouterr()
    assert "Warning" not in captured.err
    assert "opd_stop_class" in captured.out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() == {"arms"}
    assert len(summary["arms"]) == 7
    assert all(
        arm.keys() == {field.name for field in fields(ArmSummary)} for arm in summary["arms"]
    )
    assert "stable_opd" in (tmp_path / "report.html").read_text()

    kept = tmp_path / "seed0/collapse/opd/model/config.json"
    written = kept.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "seed0/collapse/sft/model")  # as if interrupted before its end
    run.run_demo(tmp_path, 1)
    assert kept.stat().st_mtime_ns == written
    assert json.loads((tmp_path / "summary.json").read_text()) == summary

    changed = [shrunk(job, optimizer={"lr": 1.0}) for job in demo_jobs(tmp_path, [0])]
    with pytest.raises(ValueError, match="made with other settings"):
        run.run_jobs(changed)


def test_a_failed_run_is_named_with_its_error(tmp_path: Path):
    job = Job(name="seed0/student", directory=tmp_path / "student", swap_from=tmp_path / "absent")
    with pytest.raises(ValueError, match=r"run seed0/student failed: FileNotFoundError: .*absent"):
        run.run_jobs([job])
