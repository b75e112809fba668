"""Exchanging the two stop tokens of a model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stable_opd_mcore.data.synthetic import SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.demo.relabel import WEIGHTS, swap_stop_tokens

ROWS = ("model.embed_tokens.weight", "lm_head.weight")


def write_model(directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    weights = {name: torch.randn(len(VOCABULARY), 4) for name in ROWS}
    weights["model.norm.weight"] = torch.randn(4)
    save_file(weights, directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY)}))
    return weights


def test_only_the_rows_of_the_two_stop_tokens_are_exchanged(tmp_path):
    weights = write_model(tmp_path / "model")
    swap_stop_tokens(tmp_path / "model", tmp_path / "swapped")
    swapped = load_file(tmp_path / "swapped" / WEIGHTS)
    order = list(range(len(VOCABULARY)))
    first, second = VOCABULARY.index(STOP), VOCABULARY.index(SECOND_STOP)
    order[first], order[second] = second, first
    assert swapped.keys() == weights.keys()
    for name, tensor in weights.items():
        expected = tensor[order] if name in ROWS else tensor
        assert torch.equal(swapped[name], expected)
    assert (tmp_path / "swapped" / "config.json").read_text() == (
        tmp_path / "model" / "config.json"
    ).read_text()


def test_two_exchanges_give_the_original_without_partial_copies(tmp_path):
    weights = write_model(tmp_path / "model")
    swap_stop_tokens(tmp_path / "model", tmp_path / "once")
    swap_stop_tokens(tmp_path / "once", tmp_path / "twice")
    twice = load_file(tmp_path / "twice" / WEIGHTS)
    assert all(torch.equal(twice[name], tensor) for name, tensor in weights.items())
    assert {path.name for path in tmp_path.iterdir()} == {"model", "once", "twice"}
