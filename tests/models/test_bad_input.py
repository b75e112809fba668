"""Wrong files and layouts are refused with the thing's name and a remedy, before anything has
changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models import build
from stable_opd_mcore.models.build import build_model, check_layout
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.huggingface import export_hf, load_hf
from stable_opd_mcore.models.weights import copy_weights
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from tests.models import tiny


@pytest.fixture(scope="module")
def world():
    yield start_world(ParallelConfig(), seed=0)
    stop_world()


@pytest.fixture(scope="module")
def checkpoint(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "qwen3"
    export_hf(build_model(tiny.architecture("qwen3"), world), directory, max_file_bytes=30_000)
    return directory


def _refuses(
    directory: Path, world: World, match: str, model_type: str = "qwen3", **changes
) -> None:
    chunks = build_model(tiny.architecture(model_type, **changes), world, seed=8)
    before = [weight.clone() for weight in chunks[0].parameters()]
    with pytest.raises(ValueError, match=match):
        load_hf(chunks, directory)
    after = list(chunks[0].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_another_architecture(checkpoint: Path, world: World) -> None:
    _refuses(
        checkpoint, world, r"shape \(53, 32\), expected \(53, 40\).*another arch", hidden_size=40
    )
    _refuses(checkpoint, world, r"layers.4\..* is missing", num_hidden_layers=5)
    _refuses(checkpoint, world, r"layers.3\..* no place in the model", num_hidden_layers=3)
    _refuses(checkpoint, world, r"q_proj.bias is missing", model_type="qwen2")


def test_truncated_file(checkpoint: Path, world: World, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint, tmp_path / "copy")
    victim = sorted(directory.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    _refuses(directory, world, f"{victim.name}: not readable, probably truncated")


def test_missing_pieces(checkpoint: Path, world: World, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint, tmp_path / "copy")
    victim = sorted(directory.glob("*.safetensors"))[1]
    content = load_file(victim)
    name = min(content)
    save_file({key: value for key, value in content.items() if key != name}, victim)
    _refuses(directory, world, f"{name} is not in this file")
    victim.unlink()
    _refuses(directory, world, f"{victim.name}: no such file")
    (directory / "model.safetensors.index.json").write_text("{")
    _refuses(directory, world, "not an index of safetensors")
    (directory / "model.safetensors.index.json").unlink()
    _refuses(directory, world, "neither model.safetensors nor")


def test_export_leaves_nothing_half_written(world: World, tmp_path: Path) -> None:
    """A failing export keeps the previous directory and removes its own."""
    chunks = build_model(tiny.architecture("qwen3"), world)
    export_hf(chunks, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    torch.nn.init.zeros_(chunks[0].output_layer.weight)
    chunks[0].architecture = replace(chunks[0].architecture, source={"unwritable": {1, 2}})
    with pytest.raises(TypeError):
        export_hf(chunks, tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; known: llama, qwen2, qwen3"),
        ({"hidden_size": None}, "key hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size='many' should be a positive whole number"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "rope_type .linear. needs the key factor",
        ),
        ({"rope_parameters": None}, "key rope_theta is missing"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 is no multiple of num_key_value_heads=3",
        ),
        ({"head_dim": None, "hidden_size": 34}, "hidden_size=34 is no multiple"),
    ],
)
def test_config_json(changes: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("qwen3") | changes))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_architecture(tmp_path)


def test_config_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text('{\n"model_type": }')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_architecture(tmp_path)


def test_older_rope_settings_are_read() -> None:
    """transformers before 5 wrote rope_theta and rope_scaling side by side."""
    old = tiny.config("llama") | {"rope_parameters": None, "rope_theta": 5e5}
    assert read_architecture(old).rope_theta == 5e5
    old["rope_scaling"] = {"type": "linear", "factor": 2.0}
    scaling = read_architecture(old).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_size": 4}, r"parallel.tensor=4 does not divide num_key_value_heads=2 .*\[1, 2\]"),
        ({"tensor_size": 3}, "parallel.tensor=3 does not divide num_attention_heads=4"),
        ({"pipeline_size": 3}, r"4 layers do not divide .*pipeline=3 .* among \[1, 2, 4\]"),
        ({"pipeline_size": 4, "virtual_pipeline": 2}, "= 8 stages"),
    ],
)
def test_layout_that_cannot_hold_the_model(layout: dict, message: str, world: World) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(tiny.architecture("qwen3"), replace(world, **layout))


def test_attention_that_cannot_slice_fp32(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "transformer_engine_is_usable", lambda: True)
    with pytest.raises(ValueError, match=r"parallel.context=2 with train.precision=fp32"):
        build_model(tiny.architecture("qwen3"), replace(world, context_size=2))


def test_copy_needs_one_architecture(world: World) -> None:
    small, large = (
        build_model(tiny.architecture("qwen3", num_hidden_layers=n), world) for n in (2, 4)
    )
    with pytest.raises(ValueError, match=r"num_layers=2.*num_layers=4"):
        copy_weights(small, large)


def test_frozen_model_has_no_gradients(world: World) -> None:
    frozen = build_model(tiny.architecture("qwen3"), world, trainable=False)
    assert not forward_hidden(frozen[0], tiny.microbatch([4, 3])).requires_grad
    assert not frozen[0].training
