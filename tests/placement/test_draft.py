"""A draft's directory and size, the point below which it costs, and drafts that are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.placement.draft import draft_bytes, least_tokens, refuse_unfit_draft
from stable_opd_mcore.placement.model_size import Layout, ModelSize
from stable_opd_mcore.placement.topology import smallest_tensor
from tests.config.cases import run_with
from tests.models import tiny


def config_of(student: Path | None = None, **speculative: object) -> Config:
    servers = {"engine": "sglang", "sglang": {"speculative": speculative}}
    model = {"architecture": {}} if student is None else {"path": str(student)}
    return run_with(rollout=servers, student=model)


def directory_of(path: Path, settings: dict, *tensors: str, index: bool = False) -> Path:
    """A model directory with these small tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    save_file({name: torch.zeros(64) for name in tensors}, path / "model.safetensors")
    if index:
        listed = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (path / "model.safetensors.index.json").write_text(json.dumps(listed))
    return path


def eagle3(path: Path, *tensors: str, **changes: object) -> Path:
    student = tiny.config("qwen2")
    settings = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 8}
    settings |= {key: student[key] for key in ("hidden_size", "vocab_size")}
    return directory_of(path, settings | changes, *tensors)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("qwen3_5", "mtp.fc.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("glm4_moe_lite", "model.layers.{num_layers}.eh_proj.weight"),
    ],
)
@pytest.mark.parametrize("index", [False, True])
def test_a_students_own_layer_is_found_in_its_directory(tmp_path, family, tensor, index):
    student = read_architecture(tiny.config(family))
    names = ["model.norm.weight", tensor.format(num_layers=student.num_layers)]
    path = directory_of(tmp_path / "whole", {}, *names, index=index)
    config = config_of(path, algorithm="mtp")
    refuse_unfit_draft(config, student, on_gpu=True)
    layers = ModelSize(student, Layout(1)).total_parameters()
    assert 0 < draft_bytes(config, student, 2) < 2 * layers
    without = directory_of(tmp_path / "without", {}, names[0], index=index)
    with pytest.raises(UserError, match=r"no tensor begins with .*speculative=null"):
        refuse_unfit_draft(config_of(without, algorithm="mtp"), student, on_gpu=True)
    refuse_unfit_draft(config_of(without, algorithm="mtp", draft=str(path)), student, on_gpu=True)


def test_a_draft_of_its_own_adds_its_files_to_a_servers_weights(tmp_path):
    student = read_architecture(tiny.config("qwen2"))
    config = config_of(algorithm="eagle3", draft=str(eagle3(tmp_path / "draft", "fc.weight")))
    refuse_unfit_draft(config, student, on_gpu=True)
    held = (tmp_path / "draft" / "model.safetensors").stat().st_size
    assert draft_bytes(config, student, 2) == held
    whole = 2 * ModelSize(student, Layout(1)).total_parameters()
    assert least_tokens(config, student, 2) == pytest.approx(1 + 3 * held / whole)
    assert least_tokens(run_with(rollout={"engine": "sglang"}), student, 2) is None
    gib = whole / 2**30 * 4.4  # 85 % of it, half of that for weights
    assert smallest_tensor(student, "bfloat16", 8, gib, "disaggregated") == 1
    with_draft = smallest_tensor(
        student, "bfloat16", 8, gib, "disaggregated", draft_gib=whole / 2**30
    )
    assert with_draft == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "names the class Qwen2ForCausalLM"),
        ({"target_hidden_size": 7}, "a draft for hidden_size=7, but the student has"),
        ({"vocab_size": 7}, "a draft for vocab_size=7, but the student has"),
    ],
)
def test_a_draft_of_another_student_is_refused(tmp_path, changes, reason):
    student = read_architecture(tiny.config("qwen2"))
    path = eagle3(tmp_path / "draft", "fc.weight", **changes)
    with pytest.raises(UserError, match=reason):
        refuse_unfit_draft(config_of(algorithm="eagle3", draft=str(path)), student, on_gpu=True)


def test_absent_drafts_and_cpus_are_refused(tmp_path):
    student = read_architecture(tiny.config("qwen2"))
    config = config_of(algorithm="eagle3", draft=str(tmp_path / "none"))
    with pytest.raises(UserError, match="none: no such file; give a model directory"):
        refuse_unfit_draft(config, student, on_gpu=True)
    path = eagle3(tmp_path / "draft")
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="download the draft's weights"):
        refuse_unfit_draft(config_of(algorithm="eagle3", draft=str(path)), student, on_gpu=True)
    with pytest.raises(UserError, match="a qwen2 student: its files have no layer"):
        refuse_unfit_draft(config_of(path, algorithm="mtp"), student, on_gpu=True)
    with pytest.raises(UserError, match=r"mtp without .*student\.path"):
        refuse_unfit_draft(config_of(algorithm="mtp"), student, on_gpu=True)
    with pytest.raises(UserError, match="speculative on a CPU: SGLang takes the likeliest"):
        refuse_unfit_draft(config_of(path, algorithm="mtp"), student, on_gpu=False)
