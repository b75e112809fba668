"""Exchanging the two stop tokens of a model."""

import json

import torch
from safetensors.torch import load_file, save_file

from stable_opd_mcore.data.synthetic import SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.demo.runner import WEIGHTS, swap_stop_tokens

ROWS = ("model.embed_tokens.weight", "lm_head.weight")


def test_only_the_rows_of_the_two_stop_tokens_are_exchanged_and_twice_gives_the_original(tmp_path):
    model, once, twice = (tmp_path / name for name in ("model", "once", "twice"))
    model.mkdir()
    weights = {name: torch.randn(len(VOCABULARY), 4) for name in ROWS}
    weights["model.norm.weight"] = torch.randn(4)
    save_file(weights, model / WEIGHTS)
    (model / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY)}))
    swap_stop_tokens(model, once)
    swap_stop_tokens(once, twice)
    first, second = VOCABULARY.index(STOP), VOCABULARY.index(SECOND_STOP)
    order = list(range(len(VOCABULARY)))
    order[first], order[second] = second, first
    swapped, original = load_file(once / WEIGHTS), load_file(twice / WEIGHTS)
    assert swapped.keys() == original.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(swapped[name], tensor[order] if name in ROWS else tensor)
        assert torch.equal(original[name], tensor)
    assert (once / "config.json").read_text() == (model / "config.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "once", "twice"}  # no partial
