"""Runs of students with low-rank factors: every layout, resumed from another, gives the numbers of
one rank; what the run writes is the merged model.
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
from tests.train.layouts import short_config, train_through
from tests.train.runs import metrics_of, problems, tiny_architecture
from tests.train.test_delta_nets import SIZES
from tests.train.test_experts import MIXTURE

pytestmark = pytest.mark.slow

# Layouts of four ranks, in the order in which a run goes through them.
DENSE_LAYOUTS = {
    "tp2_sp_cp2": {"tensor": 2, "context": 2, "sequence": True},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "pp2_vpp2_dp2": {"pipeline": 2, "virtual_pipeline": 2},
    "dp4": {},
}
EXPERT_LAYOUTS = {
    "ep2_tp2": {"expert": 2, "tensor": 2, "sequence": True},
    "cp2_ep2": {"expert": 2, "context": 2},
}
SHARED_LAYOUTS = {
    "ep4_tp2": {"expert": 4, "tensor": 2, "sequence": True},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
}
LORA = {"rank": 4, "alpha": 8.0, "expert_rank": 2}
KEYS = ("loss/total", "loss/pg", "loss/kl", "grad_norm", "logprob/rollout_gap_max")


def config_of(directory: Path, name: str, steps: int, **sections: Any) -> Config:
    given = {
        "student": {"architecture": tiny_architecture(16, 4), "lora": LORA},
        "teacher": {"architecture": tiny_architecture(24, 4)},
        "optimizer": {"lr": 1e-2, "warmup_steps": 0},
    }
    return short_config(directory, name, steps, **given | sections)


MOVING_LAYOUTS = {name: DENSE_LAYOUTS[name] for name in ("tp2_pp2", "tp2_sp_cp2")}
MOVING: dict[str, Any] = {"reference": {"update": "every", "every": 1}}
EXPERTS = {"student": {"architecture": MIXTURE, "lora": LORA}}  # two layers
# Gated delta nets, experts and a shared expert
SHARED = {"student": {"architecture": tiny.config("qwen3_5_moe", **SIZES), "lora": LORA}}


def on_one_rank(rank: int, world_size: int, directory: str) -> None:
    path = Path(directory)
    train(config_of(path, "dense", len(DENSE_LAYOUTS)), show_progress=False)
    train(config_of(path, "moving", len(MOVING_LAYOUTS), **MOVING), show_progress=False)
    train(config_of(path, "experts", len(EXPERT_LAYOUTS), **EXPERTS), show_progress=False)
    train(config_of(path, "shared", len(SHARED_LAYOUTS), **SHARED), show_progress=False)


def on_every_layout(rank: int, world_size: int, directory: str) -> None:
    for name, layouts, sections in (
        ("dense", DENSE_LAYOUTS, {}),
        ("moving", MOVING_LAYOUTS, MOVING),
        ("experts", EXPERT_LAYOUTS, EXPERTS),
        ("shared", SHARED_LAYOUTS, SHARED),
    ):
        train_through(layouts, config_of, Path(directory), f"{name}_resumed", **sections)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, on_one_rank, str(directory))
    run_ranks(4, on_every_layout, str(directory))
    return directory


@pytest.mark.parametrize("name", ["dense", "experts", "moving", "shared"])
def test_every_layout_gives_the_numbers_of_one_rank(runs, name):
    expected, found = metrics_of(runs / name), metrics_of(runs / f"{name}_resumed")
    rounding = 1e-3 if name == "shared" else 1e-4
    assert len(found) == len(expected) > 1
    assert expected[0]["loss/kl"] == 0  # to the student without factors
    # A reference that follows takes the factors.
    assert (abs(expected[1]["loss/kl"]) < 1e-6) == (name == "moving")
    for key in KEYS:
        wanted = [row[key] for row in expected]
        tolerance = 1e-5 if key.endswith("gap_max") else 1e-7
        assert [row[key] for row in found] == pytest.approx(wanted, rel=rounding, abs=tolerance), (
            key
        )
    own, other = (
        load_file(runs / run / "model" / "model.safetensors") for run in (name, f"{name}_resumed")
    )
    assert own.keys() == other.keys()
    for key, tensor in own.items():
        torch.testing.assert_close(other[key], tensor, rtol=10 * rounding, atol=rounding)


def from_the_trained_model(rank: int, world_size: int, directory: str) -> None:
    """Merged, and as an adapter with its base."""
    path, exact = Path(directory), {"kl": {"beta": 1.0, "estimator": "exact"}}
    merged = {"path": f"{path}/dense/model", "architecture": None, "lora": LORA}
    adapter = {
        "architecture": tiny_architecture(16, 4),
        "lora": {"rank": 4, "alpha": 8.0, "path": f"{path}/dense/adapter"},
    }
    train(config_of(path, "from_merged", 2, student=merged, **exact), show_progress=False)
    train(config_of(path, "from_adapter", 2, student=adapter, **exact), show_progress=False)
    convert(path / "from_merged" / "adapter", path / "converted")
    with pytest.raises(UserError, match="low-rank factors over random weights, which are in no"):
        convert(path / "from_adapter" / "adapter", path / "unknown_base")
    shutil.copytree(path / "from_adapter" / "adapter", path / "random_base")
    with pytest.raises(UserError, match=r"base_model_name_or_path=None is not a model directory"):
        convert(path / "random_base", path / "unknown_base")


def test_a_run_from_an_adapter_starts_as_the_trained_model(runs):
    run_ranks(1, from_the_trained_model, str(runs))
    merged, adapter = metrics_of(runs / "from_merged"), metrics_of(runs / "from_adapter")
    for key in ("loss/total", "loss/pg", "logprob/student", "logprob/teacher"):
        assert adapter[0][key] == pytest.approx(merged[0][key], rel=1e-3), key
    # to the adapter that it started with
    assert abs(adapter[0]["loss/kl"]) < 1e-6 < adapter[1]["loss/kl"]
    converted = load_file(runs / "converted" / "model.safetensors")
    exported = load_file(runs / "from_merged" / "model" / "model.safetensors")
    assert converted.keys() == exported.keys()
    assert all(torch.equal(tensor, converted[key]) for key, tensor in exported.items())


def evaluate_every_form(rank: int, world_size: int, directory: str) -> None:
    """A run's model, adapter and last checkpoint, and the adapter moved away from its run."""
    path, evaluated = Path(directory), {"num_samples": 2, "temperature": 1.0}
    options = {"data": problems(8, 6), "evaluation": evaluated, "checkpoint": {"every": 1}}
    base = {"path": f"{path}/dense/model", "architecture": None, "lora": LORA}
    base |= {"window": 200, "rope_theta": 40000.0}  # config.json of the base has others
    train(config_of(path, "evaluated", 2, student=base, **options), show_progress=False)
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
    run_ranks(1, evaluate_every_form, str(runs))
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


def in_bf16(rank: int, world_size: int, directory: str) -> None:
    options: Any = {"train": {"precision": "bf16"}}
    train(config_of(Path(directory), "bf16", 3, **options), show_progress=False)
    for steps in (1, 3):
        train(config_of(Path(directory), "bf16_resumed", steps, **options), show_progress=False)


def test_a_resume_in_bf16_is_exact(runs):
    run_ranks(2, in_bf16, str(runs))
    rows = metrics_of(runs / "bf16")
    assert metrics_of(runs / "bf16_resumed") == rows
    assert rows[0]["loss/total"] != rows[2]["loss/total"]
    pairs = [
        load_file(runs / name / "adapter" / "adapter_model.safetensors")
        for name in ("bf16", "bf16_resumed")
    ]
    assert all(torch.equal(tensor, pairs[1][key]) for key, tensor in pairs[0].items())


def test_only_the_matrices_of_layers_differ_in_the_trained_model(runs):
    config = config_of(runs, "dense", 1)
    world = start_world(config.parallel, 0)
    start = build_run(RunInputs(config), world).student.chunks
    trained = load_file(runs / "dense" / "model" / "model.safetensors")
    for name, tensor in iter_hf_tensors(start):
        is_trained = name.endswith("_proj.weight")
        assert torch.equal(tensor, trained[name]) != is_trained, name
    stop_world()


def test_a_checkpoint_holds_the_factors_and_is_refused_elsewhere(runs):
    config = config_of(runs, "dense", len(DENSE_LAYOUTS))
    checkpoint = runs / "dense" / "checkpoints" / f"step_{len(DENSE_LAYOUTS):06d}"
    record = json.loads((checkpoint / "state.json").read_text())
    assert record["factors"] == {"rank": 4, "alpha": 8.0}
    world = start_world(config.parallel, 0)
    with pytest.raises(UserError, match=r"without the model under them; give the run's model/"):
        load_weights(build_model(tiny.architecture("qwen3"), world), checkpoint)
    stop_world()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"student": {"architecture": tiny_architecture(16, 4)}},
            "the config has student.lora=null",
        ),
        (
            {"student": {"architecture": tiny_architecture(16, 4), "lora": {"rank": 8}}},
            "rank=8, alpha=32",
        ),
        ({"train": {"seed": 1}}, "belong to weights with the hash"),
    ],
)
def test_a_resume_with_another_base_or_other_factors_is_refused(runs, sections, message):
    config = config_of(runs, "dense", len(DENSE_LAYOUTS) + 1, **sections)
    with pytest.raises(UserError, match=message):
        train(config, show_progress=False, accept_changes=True)
    stop_world()
