"""Weights are refused as train refuses them, from their headers alone."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from stable_opd_mcore.checks import models
from stable_opd_mcore.checks.known import Known
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.tensors import hf_shapes
from tests.checks.directories import write_model
from tests.train.runs import tiny_config


@pytest.fixture
def model(tmp_path):
    path = write_model(tmp_path / "model")
    architecture = read_architecture(path)
    tensors = {name: torch.zeros(shape) for name, shape in hf_shapes(architecture).items()}
    save_file(tensors, f"{path}/model.safetensors")
    return path, tensors


def check(tmp_path, path, **fields):
    student = {"path": path, "architecture": None, **fields}
    config = tiny_config(tmp_path, "run", student=student, tokenizer={"path": None}, teacher=None,
                         objective={"name": "grpo"}, kl={"beta": 0})  # fmt: skip
    models.weights(Known(config, None))


def test_whole_weights_give_no_finding(tmp_path, model):
    check(tmp_path, model[0])


def test_a_teacher_with_the_students_weights_and_prompt_is_found(tmp_path, model):
    path, tensors = model
    copy = shutil.copytree(path, tmp_path / "copy")
    other = shutil.copytree(path, tmp_path / "other")
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(changed, other / "model.safetensors")
    student = {"path": path, "architecture": None}
    for teacher, found in (
        ({"path": str(copy)}, 1),
        ({"path": "self"}, 1),
        ({"path": str(other)}, 0),
        ({"path": str(copy), "prompt": "{{ problem }}"}, 0),
    ):
        teacher = teacher | {"architecture": None}
        config = tiny_config(
            tmp_path, "run", student=student, teacher=teacher, tokenizer={"path": None}
        )
        assert len(list(models.same_weights(Known(config, None)))) == found


def test_missing_misshapen_truncated_and_absent_weights_are_refused(tmp_path, model):
    path, tensors = model
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, file)
    with pytest.raises(UserError, match=r"tensor model.norm.weight is missing"):
        check(tmp_path, path)
    save_file({**tensors, "model.norm.weight": torch.zeros(16)}, file)
    with pytest.raises(UserError, match=r"model.norm.weight has shape \(16,\), expected \(32,\)"):
        check(tmp_path, path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="not readable, probably truncated"):
        check(tmp_path, path)
    file.unlink()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        check(tmp_path, path)


def test_a_config_json_that_train_refuses_is_refused(tmp_path):
    path = write_model(tmp_path / "model", use_sliding_window=True)
    section = {"path": path, "architecture": None}
    student = Known(tiny_config(tmp_path, "run", student=section), None)
    with pytest.raises(UserError, match="use_sliding_window=True is not supported"):
        models.student_settings(student)
    models.teacher_settings(student)
    with pytest.raises(UserError, match="use_sliding_window=True is not supported"):
        models.teacher_settings(Known(tiny_config(tmp_path, "run", teacher=section), None))
