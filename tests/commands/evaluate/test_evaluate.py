"""`stable-opd evaluate` on a trained run: the same numbers in every form, layout and restart."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from stable_opd_mcore.commands.evaluate import evaluate as evaluation
from stable_opd_mcore.commands.evaluate.evaluate import evaluate_config
from stable_opd_mcore.commands.evaluate.evaluated_model import evaluation_config
from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.train import held_out
from stable_opd_mcore.train.oversight.signals import Stopped
from tests.parallel.launch import run_ranks
from tests.train.runs import problems, tiny_config

pytestmark = pytest.mark.slow

PROBLEMS = problems(64, 12)


def train_two_steps(home: Path) -> None:
    config = tiny_config(
        home,
        "run",
        data=PROBLEMS,
        train={"steps": 2},
        checkpoint={"every": 1},
        evaluation={"every": 0, "num_samples": 2, "temperature": 1.0},
    )
    train(config, show_progress=False)


def files_of(directory: Path) -> dict[str, bytes]:
    names = ("results.json", "results.md")
    files = [*(directory / name for name in names), *directory.glob("responses/*/*")]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def numbers_of(directory: Path) -> dict[str, object]:
    record = json.loads((directory / "results.json").read_text())
    del record["model"]["path"]
    return record


def kill_after(count: int, how):
    """Write `count` parts, then call `how`."""
    write = evaluation.write_together

    def written(path, rollouts, world):
        if path.name == f"part_{count:05d}.jsonl":
            how()
        write(path, rollouts, world)

    evaluation.write_together = written
    return lambda: setattr(evaluation, "write_together", write)


class Killed(BaseException):
    pass


def kill():
    raise Killed


def evaluate_in_all_forms(rank: int, world_size: int, home: Path) -> None:
    held_out.SAMPLES_PER_PART = 6  # three problems
    train_two_steps(home)
    run = home / "run"
    lines: list[str] = []
    results = evaluate_config(evaluation_config(run), lines.append)
    assert results == run / "evaluation" / "step_000002"
    whole, numbers = files_of(results), numbers_of(results)
    assert len(list(results.glob("responses/held_out/part_*.jsonl"))) == 4
    assert lines[0].startswith(f"run step 2: {run / 'model'}, weights ")
    assert numbers["model"]["weights_sha256"][:12] in lines[0]
    assert numbers["benchmarks"]["held_out"]["num_problems"] == 12
    assert numbers["settings"]["chat_template_kwargs"] == {}
    assert (run / "DONE").read_text() == '{"step": 2}'
    assert (run / "evaluation" / "DONE").exists()
    other = shutil.copytree(run, home / "run_other")  # plays another seed
    settings = yaml.safe_load((other / "config.resolved.yaml").read_text())
    settings["train"]["seed"] += 1
    (other / "config.resolved.yaml").write_text(yaml.safe_dump(settings))
    (other / "metrics.jsonl").unlink()  # a table of results reads no metrics
    of_other = other / "evaluation" / results.name
    evaluate_config(evaluation_config(run), lines.append, others=[of_other])
    assert files_of(results) == whole
    with pytest.raises(UserError, match=r"its responses have rotary .*, this evaluation .*'theta'"):
        evaluate_config(evaluation_config(run, overrides=["student.rope_theta=3"]), lines.append)
    assert "| run, step_000002, mean of 2 seeds |" in lines[-1]
    some = evaluate_config(evaluation_config(run), lines.append, limit=4)
    assert some.name == "step_000002_first_4"
    correct = numbers["benchmarks"]["held_out"]["num_correct"]
    assert numbers_of(some)["benchmarks"]["held_out"]["num_correct"] == correct[:4]

    for part in ("model", "checkpoints/step_000002"):
        move_over(results, home / "first")
        evaluate_config(evaluation_config(run / part), lines.append)
        assert numbers_of(results) == numbers
        move_over(home / "first", results)
    before = evaluate_config(evaluation_config(run / "checkpoints" / "step_000001"), lines.append)
    assert before.name == "step_000001"
    assert numbers_of(before)["model"]["weights_sha256"] != numbers["model"]["weights_sha256"]

    for how, error in ((kill, Killed), (lambda: os.kill(os.getpid(), signal.SIGTERM), Stopped)):
        move_over(results, home / "first")
        restore = kill_after(2, how)
        with pytest.raises(error):
            evaluate_config(evaluation_config(run), lines.append)
        restore()
        assert not (results / "results.json").exists()
        assert (run / "evaluation" / "REQUEUE").exists() == (error is Stopped)
        evaluate_config(evaluation_config(run), lines.append)
        assert files_of(results) == whole
        move_over(home / "first", results)


def move_over(source: Path, target: Path) -> None:
    """Rename a directory over another, which goes."""
    for file in sorted(target.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    if target.exists():
        target.rmdir()
    source.rename(target)


def test_run_model_and_checkpoint_give_the_same_numbers_and_a_restart_the_same_files(tmp_path):
    run_ranks(1, evaluate_in_all_forms, tmp_path)


def evaluate_on_ranks(rank: int, world_size: int, home: Path) -> None:
    if world_size == 1:
        make_model(home)
    held_out.SAMPLES_PER_PART = 6
    config = tiny_config(
        home,
        f"ranks_{world_size}",
        student={
            "architecture": None,
            "path": str(home / "model"),
            "stop_token_ids": [20],
            "chat_template_kwargs": {"thinking": True},
        },
        tokenizer={"path": str(home / "model")},
        data=PROBLEMS,
        evaluation={
            "model": str(home / "model"),
            "num_samples": 2,
            "max_new_tokens": 117,
            "chat_template_kwargs": {"thinking": False},
        },
    )
    evaluate_config(config, lambda line: None)


def rows_of(files: dict[str, bytes]) -> list[dict]:
    parts = sorted(name for name in files if "part_" in name)
    return [json.loads(row) for name in parts for row in files[name].splitlines()]


def outcome_of(row: dict) -> tuple:
    """A response without its log-probabilities, whose last digit depends on the batch."""
    keys = ("prompt_id", "sample_index", "response_token_ids", "reward", "finish_reason")
    return tuple(row[key] for key in keys)


def make_model(home: Path) -> None:
    train_two_steps(home)
    (home / "run" / "model").rename(home / "model")
    template = home / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if thinking %}{% endif %}")


def test_ranks_share_the_work_and_over_long_problems_count_as_wrong(tmp_path):
    for ranks in (1, 2):
        run_ranks(ranks, evaluate_on_ranks, tmp_path)
    one, two = (files_of(tmp_path / f"ranks_{ranks}" / "evaluation" / "model") for ranks in (1, 2))
    assert one["results.json"] == two["results.json"]
    rows, others = rows_of(one), rows_of(two)
    assert [outcome_of(row) for row in rows] == [outcome_of(row) for row in others]
    record = json.loads(one["results.json"])
    assert record["settings"]["chat_template_kwargs"] == {"thinking": False}
    values = record["benchmarks"]["held_out"]
    assert 0 < values["num_over_long"] < 12
    assert len(rows) == 2 * (12 - values["num_over_long"])
    assert len(values["num_correct"]) == values["num_problems"] == 12
