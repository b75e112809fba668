"""Weights in Megatron's form: damaged or malicious directories are refused with the file's name.

Not the checkpoints of a run; those are in tests/train/persistence/test_checkpoint.py.
"""

import pickle
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.files import megatron_checkpoint
from stable_opd_mcore.models.files.directory_save import save_directory
from stable_opd_mcore.models.files.manifest import MANIFEST, write_manifest
from stable_opd_mcore.models.files.megatron_checkpoint import (
    METADATA,
    load_weights,
    save_weights,
    set_weights,
    weights_of,
)
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.parallel.world import World
from tests.models import tiny


class MaliciousPickle:
    def __reduce__(self) -> tuple:
        return (print, ("executed",))


@pytest.fixture(scope="module")
def chunks(world):
    return build_model(tiny.architecture("qwen3", num_hidden_layers=1), world)


@pytest.fixture
def directory(chunks: list[HiddenStatesGPTModel], tmp_path: Path) -> Path:
    save_weights(
        chunks, tmp_path / "model", lambda path: (path / "tokenizer.json").write_text("{}")
    )
    return tmp_path / "model"


def test_damaged_weights_are_refused(chunks: list[HiddenStatesGPTModel], directory: Path) -> None:
    kept = (directory / "metadata.json").read_bytes()
    (directory / "metadata.json").unlink()
    with pytest.raises(UserError, match=r"model: damaged: metadata.json is missing; copy or conv"):
        load_weights(chunks, directory)
    (directory / "metadata.json").write_bytes(kept)
    load_weights(chunks, directory)


def test_code_in_the_metadata_is_not_executed(
    chunks: list[HiddenStatesGPTModel], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / MANIFEST).unlink()
    (directory / METADATA).write_bytes(pickle.dumps(MaliciousPickle()))
    write_manifest(directory, [])
    with pytest.raises(UserError, match=r"\.metadata: not a checkpoint's .*builtins.print"):
        load_weights(chunks, directory)
    assert "executed" not in capsys.readouterr().out


def test_existing_directories_and_non_finite_weights_are_refused(
    chunks: list[HiddenStatesGPTModel], directory: Path
) -> None:
    with pytest.raises(UserError, match="model exists"):
        save_weights(chunks, directory, print)
    torch.nn.init.constant_(chunks[0].output_layer.weight, torch.inf)
    with pytest.raises(UserError, match=r"new is not written: tensor lm_head.weight"):
        save_weights(chunks, directory.with_name("new"), print)
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


class _TransformerEngineLike(torch.nn.Module):
    """A layer with `_extra_state` in its state dict, as all layers of Transformer Engine have."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3, dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None:
        raise AssertionError("not saved, so not loaded")


def test_extra_state_is_neither_saved_nor_needed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch layers load what Transformer Engine's wrote, and the reverse."""
    with_state, without = (build_model(tiny.architecture("qwen3"), world, seed=s) for s in (1, 2))
    with_state[0].decoder.add_module("fused", _TransformerEngineLike())
    with monkeypatch.context() as patch:
        patch.setattr(megatron_checkpoint, "_EXTRA_STATE", "no such name")
        assert any("_extra_state" in name for name in weights_of(with_state)["model0"])
        save_weights(with_state, tmp_path / "with", lambda _: None)
    assert not any("_extra_state" in name for name in weights_of(with_state)["model0"])
    load_weights(without, tmp_path / "with")
    expected = dict(with_state[0].named_parameters())
    for name, weight in without[0].named_parameters():
        assert torch.equal(weight, expected[name]), name
        torch.nn.init.constant_(weight, 2.0)
    save_weights(without, tmp_path / "without", lambda _: None)
    load_weights(with_state, tmp_path / "without")
    assert all(bool((weight == 2).all()) for weight in with_state[0].parameters())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "mlp.linear_fc1.layer_norm_weight"),
        ("qwen3_moe", "pre_mlp_layernorm.weight"),
        ("deepseek_v2", "0.input_layernorm.weight"),  # latents, and a dense MLP in this layer
    ],
)
def test_norms_have_the_names_of_transformer_engines_layers(
    world: World, family: str, name: str
) -> None:
    """Which fuse them into the MLP or attention that follows, but not into experts or latents."""
    model = build_model(tiny.architecture(family), world, seed=None)
    saved = {item.key for item in weights_of(model)["model0"].values()}
    assert f"decoder.layers.{name}" in saved


def test_a_weight_that_the_checkpoint_lacks_is_an_error(
    chunks: list[HiddenStatesGPTModel], tmp_path: Path
) -> None:
    tree = weights_of(chunks)
    name = "decoder.final_layernorm.weight"
    item = tree["model0"].pop(name)
    save_directory(tree, chunks, tmp_path / "model", lambda _: None)
    with pytest.raises(
        UserError, match=rf"model: not this model's weights .*{name} from model not in"
    ):
        load_weights(chunks, tmp_path / "model")
    loaded = {"model0": dict(chunks[0].state_dict())}
    del loaded["model0"][name]
    with pytest.raises(RuntimeError, match=rf"not loaded: \['{name}'\]"):
        set_weights(chunks, loaded)
    assert item.data is not None
