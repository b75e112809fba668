"""The whole demonstration with a few steps a run: files, table, resumption, failures."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stable_opd_mcore.commands.demo import runner
from stable_opd_mcore.commands.demo.recipe import Job, demo_jobs
from stable_opd_mcore.data.synthetic import SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.train.oversight import measures

pytestmark = pytest.mark.slow

SWAPPED = ("model.embed_tokens.weight", "lm_head.weight")  # have rows of the stop tokens
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


def test_the_demo_end_to_end_and_again_from_a_copied_directory(tmp_path: Path, monkeypatch, capfd):
    def few_jobs(*arguments: Any) -> list[Job]:
        return [job for job in demo_jobs(*arguments) if job.arm in (None, "opd", "opd_stop_class")]

    monkeypatch.setattr(
        runner, "demo_jobs", lambda *arguments: [shrunk(job) for job in few_jobs(*arguments)]
    )
    first, copy = tmp_path / "first", tmp_path / "a copy"
    runner.run_demo(first, 1)
    captured = capfd.readouterr()
    assert "Warning" not in captured.err
    assert "opd_stop_class" in captured.out
    assert max(map(len, captured.out.partition("curves")[0].splitlines())) <= 80
    arms = [line.split()[1] for line in captured.err.splitlines() if "truncation" in line]
    assert arms == ["opd", "opd_stop_class"]
    summary = json.loads((first / "summary.json").read_text())
    fixed = {"arm", "seed", "initial_accuracy", "greedy_final_accuracy"}
    assert [fixed <= arm.keys() and len(arm) == 12 for arm in summary["arms"]] == [True, True]
    assert "opd_stop_class" in (first / "report.html").read_text()

    first.rename(copy)
    kept = copy / "seed0/collapse/opd/model/config.json"
    written = kept.stat().st_mtime_ns
    shutil.rmtree(copy / "seed0/collapse/opd_stop_class/model")  # plays an interruption
    runner.run_demo(copy, 1)
    assert kept.stat().st_mtime_ns == written
    assert json.loads((copy / "summary.json").read_text()) == summary

    changed = [shrunk(job, optimizer={"lr": 1.0}) for job in few_jobs(copy, 1)]
    with pytest.raises(ValueError, match="settings are not those of this version"):
        runner.run_jobs(changed)


def test_a_worker_does_not_print_what_guards_say(tmp_path: Path):
    logger = measures.logger
    level = logger.level
    assert logger.isEnabledFor(logging.WARNING)
    try:
        with pytest.raises(FileNotFoundError):
            runner._work(Job(name="copy", directory=tmp_path, swap_from=tmp_path / "absent"))
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
    finally:
        logger.setLevel(level)


def test_a_failed_run_is_named_with_its_error(tmp_path: Path):
    job = Job(name="seed0/student", directory=tmp_path / "student", swap_from=tmp_path / "absent")
    with pytest.raises(ValueError, match=r"run seed0/student failed: FileNotFoundError: .*absent"):
        runner.run_jobs([job])


def test_only_the_rows_of_the_two_stop_tokens_are_exchanged_and_twice_gives_the_original(tmp_path):
    model, once, twice = (tmp_path / name for name in ("model", "once", "twice"))
    model.mkdir()
    weights = {name: torch.randn(len(VOCABULARY), 4) for name in SWAPPED}
    weights["model.norm.weight"] = torch.randn(4)
    save_file(weights, model / runner.WEIGHTS)
    (model / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY)}))
    runner.swap_stop_tokens(model, once, SWAPPED)
    runner.swap_stop_tokens(once, twice, SWAPPED)
    first, second = VOCABULARY.index(STOP), VOCABULARY.index(SECOND_STOP)
    order = list(range(len(VOCABULARY)))
    order[first], order[second] = second, first
    swapped, original = load_file(once / runner.WEIGHTS), load_file(twice / runner.WEIGHTS)
    assert swapped.keys() == original.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(swapped[name], tensor[order] if name in SWAPPED else tensor)
        assert torch.equal(original[name], tensor)
    assert (once / "config.json").read_text() == (model / "config.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "once", "twice"}  # no partial
