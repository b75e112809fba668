"""Runs of students with low-rank factors on one rank: what they write, and what starts from it.

On every layout: test_layouts.py.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stable_opd_mcore.commands.convert.convert import convert
from stable_opd_mcore.commands.evaluate.evaluate import evaluate_config
from stable_opd_mcore.commands.evaluate.evaluated_model import evaluation_config
from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.models.files.megatron_checkpoint import load_weights
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.weights import iter_hf_tensors
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.setup import build_run
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, problems
from tests.train.test_layouts import CASES, DENSE, LORA, SOME, config_of

pytestmark = pytest.mark.slow


def dense_config(directory: Path, name: str, steps: int = 2, **sections: Any) -> Config:
    return config_of(directory, name, CASES["dense_factors"], steps, **sections)


def train_and_start_again(rank: int, world_size: int, directory: str) -> None:
    path = Path(directory)
    train(dense_config(path, "dense"), show_progress=False)
    from_the_trained_model(path)
    taught_by_adapters(path)
    evaluate_every_form(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, train_and_start_again, str(directory))
    return directory


def from_the_trained_model(path: Path) -> None:
    """Merged, and as an adapter with its base."""
    exact = {"kl": {"beta": 1.0, "estimator": "exact"}}
    merged = {"path": f"{path}/dense/model", "architecture": None, **LORA}
    lora = {"rank": 4, "alpha": 8.0, "path": f"{path}/dense/adapter"}
    adapter = {"architecture": DENSE, "lora": lora}
    train(dense_config(path, "from_merged", student=merged, **exact), show_progress=False)
    train(dense_config(path, "from_adapter", student=adapter, **exact), show_progress=False)
    convert(path / "from_merged" / "adapter", path / "converted")
    with pytest.raises(UserError, match="low-rank factors over random weights, which are in no"):
        convert(path / "from_adapter" / "adapter", path / "unknown_base")
    shutil.copytree(path / "from_adapter" / "adapter", path / "random_base")
    with pytest.raises(UserError, match=r"base_model_name_or_path=None is not a model directory"):
        convert(path / "random_base", path / "unknown_base")


def test_a_run_from_an_adapter_starts_as_the_trained_model(runs):
    merged, adapter = metrics_of(runs / "from_merged"), metrics_of(runs / "from_adapter")
    for key in ("loss/total", "loss/pg", "logprob/student", "logprob/teacher"):
        assert adapter[0][key] == pytest.approx(merged[0][key], rel=1e-3), key
    # to the adapter that it started with
    assert abs(adapter[0]["loss/kl"]) < 1e-6 < adapter[1]["loss/kl"]
    converted = load_file(runs / "converted" / "model.safetensors")
    exported = load_file(runs / "from_merged" / "model" / "model.safetensors")
    assert converted.keys() == exported.keys()
    assert all(torch.equal(tensor, converted[key]) for key, tensor in exported.items())


def taught_by_adapters(path: Path) -> None:
    """Train with two teachers, the student's base and an adapter on it. The run `shared` uses the
    student's weights for both, the run `own` loads the base again."""
    student = {"path": f"{path}/dense/model", "architecture": None, **LORA}
    models = {"tuned": {"adapter": f"{path}/dense/adapter"}}
    sources = [problems(8, 1)["train"] | {"name": name} for name in ("base", "tuned")]
    sources[1]["teacher"] = "tuned"
    for name, teacher in (("shared", student["path"]), ("own", f"{path}/dense/../dense/model")):
        files = {"path": teacher, "architecture": None, "models": models}
        data = {"train": sources}
        config = dense_config(path, name, student=student, teacher=files, data=data)
        assert config.weights_of["teacher"] == {"shared": "base", "own": "teacher"}[name]
        train(config, show_progress=False)


def test_a_teacher_that_is_the_base_needs_no_weights_of_its_own(runs):
    shared, own = metrics_of(runs / "shared"), metrics_of(runs / "own")
    assert shared[1]["kl/teacher"] != pytest.approx(shared[0]["kl/teacher"], rel=1e-2)
    for ours, others in zip(shared, own, strict=True):
        for key in ("loss/pg", "logprob/teacher", "kl/teacher", "grad_norm"):
            assert ours[key] == pytest.approx(others[key], rel=1e-5), key


def evaluate_every_form(path: Path) -> None:
    """A run's model, adapter and last checkpoint, and the adapter moved away from its run."""
    evaluated = {"num_samples": 2, "temperature": 1.0}
    options: dict[str, Any] = {
        "data": problems(8, 6),
        "evaluation": evaluated,
        "checkpoint": {"every": 1},
    }
    base = {"path": f"{path}/dense/model", "architecture": None, **LORA}
    base |= {"window": 200, "rope_theta": 40000.0}  # config.json of the base has others
    train(dense_config(path, "evaluated", student=base, **options), show_progress=False)
    run, moved = path / "evaluated", path / "moved"
    shutil.copytree(run / "adapter", moved)
    for number, form in enumerate(("model", "adapter", "checkpoints/step_000002")):
        results = evaluate_config(evaluation_config(run / form), print)
        results.rename(path / f"results_{number}")
    settings = evaluation_config(moved, run / "config.resolved.yaml", ["rollout.engine=embedded"])
    evaluate_config(settings, print).rename(path / "results_3")
    for number, source in enumerate((moved, run / "checkpoints" / "step_000002")):
        convert(source, path / f"converted_{number}")
    (run / "model").rename(path / "trained")
    assert evaluate_config(evaluation_config(run), print).name == "step_000002"
    shutil.copytree(run / "checkpoints" / "step_000002", path / "alone")
    with pytest.raises(UserError, match=r"a checkpoint of student\.lora without its run"):
        evaluate_config(evaluation_config(path / "alone", run / "config.resolved.yaml"), print)


def test_every_form_of_an_adapter_evaluates_as_the_merged_model(runs):
    merged, *others = (
        json.loads((runs / f"results_{number}" / "results.json").read_text()) for number in range(4)
    )
    for record in others:
        assert record["model"]["weights_sha256"] == merged["model"]["weights_sha256"]
        assert record["benchmarks"] == merged["benchmarks"]
        assert record["model"]["step"] == 2
    assert merged["benchmarks"]["held_out"]["num_problems"] == 6
    for name in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        wanted = (runs / "trained" / name).read_bytes()
        assert all((runs / f"converted_{i}" / name).read_bytes() == wanted for i in range(2)), name


def test_only_the_matrices_of_layers_differ_in_the_trained_model(runs):
    config = dense_config(runs, "dense", steps=1)
    world = start_world(config.parallel, 0)
    start = build_run(RunInputs(config), world).student.chunks
    trained = load_file(runs / "dense" / "model" / "model.safetensors")
    for name, tensor in iter_hf_tensors(start):
        is_trained = name.endswith("_proj.weight")
        assert torch.equal(tensor, trained[name]) != is_trained, name
    stop_world()


def test_a_checkpoint_holds_the_factors_and_is_refused_elsewhere(runs):
    config = dense_config(runs, "dense")
    checkpoint = runs / "dense" / "checkpoints" / "step_000002"
    record = json.loads((checkpoint / "state.json").read_text())
    assert record["factors"] == {"rank": 4, "alpha": 8.0}
    world = start_world(config.parallel, 0)
    with pytest.raises(UserError, match=r"without the model under them; give the run's model/"):
        load_weights(build_model(tiny.architecture("qwen3"), world), checkpoint)
    stop_world()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"student": {"architecture": DENSE}}, "the config has student.lora=null"),
        ({"student": {"architecture": DENSE, "lora": {"rank": 8}}}, "rank=8, alpha=32"),
        (
            {"student": {"architecture": DENSE, **SOME}},
            r"rank=4, alpha=8, rslora=true, matrices=\[q_proj, v_proj\]",
        ),
        ({"train": {"seed": 1}}, "belong to weights with the hash"),
    ],
)
def test_a_resume_with_another_base_or_other_factors_is_refused(runs, sections, message):
    config = dense_config(runs, "dense", steps=3, **sections)
    with pytest.raises(UserError, match=message):
        train(config, show_progress=False, accept_changes=True)
    stop_world()
