"""Weights in Megatron's form: damaged or malicious directories are refused with the file's name.

Not the checkpoints of a run; those are in tests/train/test_checkpoint.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.manifest import MANIFEST, find_damage
from stable_opd_mcore.models.megatron_checkpoint import METADATA, load_weights, save_weights
from stable_opd_mcore.parallel.world import start_world, stop_world
from tests.models import tiny


class MaliciousPickle:
    def __reduce__(self) -> tuple:
        return (print, ("executed",))


@pytest.fixture(scope="module")
def chunks():
    yield build_model(
        tiny.architecture("qwen3", num_hidden_layers=1), start_world(ParallelConfig(), 0)
    )
    stop_world()


@pytest.fixture
def directory(chunks: list[HiddenStatesGPTModel], tmp_path: Path) -> Path:
    save_weights(
        chunks, tmp_path / "model", lambda path: (path / "tokenizer.json").write_text("{}")
    )
    return tmp_path / "model"


def test_damage_to_each_file_is_found(directory: Path) -> None:
    assert find_damage(directory) is None
    for path in directory.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        fault = find_damage(directory)
        assert fault is not None
        assert path.name in fault
        path.write_bytes(content)


def test_damaged_weights_are_refused(chunks: list[HiddenStatesGPTModel], directory: Path) -> None:
    load_weights(chunks, directory)
    (directory / "common.pt").unlink()
    with pytest.raises(UserError, match=r"model: damaged: common.pt is missing"):
        load_weights(chunks, directory)


def test_code_in_the_metadata_is_not_executed(
    chunks: list[HiddenStatesGPTModel], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / MANIFEST).unlink()
    (directory / METADATA).write_bytes(pickle.dumps(MaliciousPickle()))
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
