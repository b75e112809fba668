"""Layers in inference mode give what the trainer's forward pass gives, and leave no trace."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, forward_hidden
from stable_opd_mcore.rollout.inference import inference_mode, run_layers
from stable_opd_mcore.rollout.kv_cache import KVCache
from tests.models import tiny

LENGTH = 9


def hidden_in_pieces(chunk: HiddenStatesGPTModel, tokens_T: Tensor, first: int) -> Tensor:
    """[T, H]: the first tokens at once, then one by one."""
    positions_T = torch.arange(LENGTH)
    rotaries = chunk.architecture.rotaries()
    angles = [torch.outer(positions_T, each.frequencies()) for each in rotaries]
    cache = KVCache([first], angles, torch.float32)
    found = []
    with inference_mode([chunk]):
        for piece_T in (tokens_T[:first], *tokens_T[first:].split(1)):
            cache.begin(len(piece_T))
            found.append(run_layers(chunk, chunk.embedding(piece_T[None], None), cache))
            cache.end()
    return torch.cat(found)[:, 0]


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "llama", "qwen3_vl", "qwen3_moe", "qwen3_5", "gpt_oss", "qwen3_next"),
        *("gemma3", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "glm4_moe"),
    ],
)
def test_hidden_states_are_those_of_the_trainers_forward_pass(world, family):
    (chunk,) = build_model(tiny.architecture(family), world, trainable=True, recompute="full")
    batch = tiny.microbatch([LENGTH])
    found = hidden_in_pieces(chunk, batch.tokens_T, first=4)
    hidden_TH = forward_hidden(chunk, batch)  # after the other, which leaves nothing behind
    tolerance = tiny.tolerance(chunk.architecture)
    torch.testing.assert_close(found.clone(), hidden_TH, rtol=tolerance, atol=tolerance)
    hidden_TH.sum().backward()
    assert all(p.grad is not None for name, p in chunk.named_parameters() if "linear" in name)


def test_modes_flags_and_methods_are_restored_also_after_an_error(world):
    (chunk,) = build_model(tiny.architecture("qwen3_moe"), world, trainable=True)
    chunk.config.sequence_parallel = chunk.embedding.scatter_to_sequence_parallel = True
    chunk.config.fp8 = "e4m3"
    with suppress(KeyError), inference_mode([chunk]):
        assert torch.is_inference_mode_enabled()
        assert not any(module.training for module in chunk.modules())
        assert not chunk.config.sequence_parallel
        assert not chunk.embedding.scatter_to_sequence_parallel
        assert chunk.config.fp8 is None
        raise KeyError
    assert not torch.is_inference_mode_enabled()
    assert all(module.training for module in chunk.modules())
    assert all("forward" not in vars(module) for module in chunk.modules())
    assert chunk.config.sequence_parallel
    assert chunk.embedding.scatter_to_sequence_parallel
    assert chunk.config.fp8 == "e4m3"
