"""The models of a run are built without random weights where a file or a copy gives them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.commands.plan.plan import Cluster
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.inputs.loading import load_sources
from stable_opd_mcore.inputs.run_inputs import Place
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import export_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.train import run_models, setup
from stable_opd_mcore.train.reference import frozen_student
from tests.train.runs import tiny_architecture, tiny_config


@pytest.mark.parametrize("reference", ["copied", "from a directory"])
def test_student_and_reference_are_filled_without_random_weights(
    reference: str, world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_hf(build_model(read_architecture(tiny_architecture(32, 2)), world), tmp_path / "model")
    path = {"path": str(tmp_path / "model")}
    config = tiny_config(
        tmp_path,
        "run",
        student=path | {"architecture": None},
        reference=path if reference == "from a directory" else {},
    )
    monkeypatch.setattr(run_models, "random_weights", None)  # calling it would fail
    before = torch.get_rng_state()
    student = run_models.load_model(config, world, config.student, 27, trainable=True)
    frozen, moving = frozen_student(config, world, student, config.reference, None)
    assert moving is None
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(weight.requires_grad for weight in frozen[0].parameters())
    for own, other in zip(student[0].parameters(), frozen[0].parameters(), strict=True):
        assert torch.equal(own, other)
        assert own.isfinite().all()
        assert own.data_ptr() != other.data_ptr()


def test_the_place_of_a_world_is_its_gpus(world, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup.place_of(world) == Place(Cluster(1, 1), "cpu")
    on_gpus = replace(world, device=torch.device("cuda", 0), world_size=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    for name, known in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100", "nvidia a100"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert setup.place_of(on_gpus) == Place(Cluster(2, 4, spare_gpus=2), known)


def test_a_source_without_a_function_of_its_own_has_the_run_s_unless_it_is_null(tmp_path) -> None:
    (tmp_path / "own.py").write_text("def reward(row, response): return float(row['answer']) / 100")
    reward = {"function": f"{tmp_path}/own.py:reward"}
    sources = [
        {"path": "synthetic:arithmetic", "name": name, "options": {"rows": 1}, **own}
        for name, own in {"plain": {}, "null": {"reward": {"function": None}}}.items()
    ]
    config = tiny_config(tmp_path, "run", reward=reward, data={"train": sources})
    prompts = [
        Prompt(row.row_id, "", (1,), row.answer, answer_format="bracket", columns=row.columns)
        for row in load_sources(config)
    ]
    rollouts = [
        Rollout(prompt, 0, (5,), (0.0,), "stop", 0, text=f"[{prompt.answer}]") for prompt in prompts
    ]
    with Grader(rewards=setup.rewards_of(config)) as grader:
        graded = grader.grade_rollouts(rollouts)
    assert prompts[0].answer not in (None, "100")
    assert [rollout.reward for rollout in graded] == [float(prompts[0].answer or 0) / 100, 1.0]
