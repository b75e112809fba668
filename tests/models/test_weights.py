"""The check for non-finite weights. Copies are compared in tests/train/test_reference.py."""

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.weights import refuse_non_finite
from stable_opd_mcore.parallel.world import World
from tests.models import tiny


def test_error_names_a_non_finite_weight(world: World) -> None:
    chunks = build_model(tiny.architecture("qwen3"), world)
    refuse_non_finite(chunks, "step 3")
    with torch.no_grad():
        chunks[0].decoder.layers[1].self_attention.linear_qkv.weight[5, 2] = -torch.inf
    with pytest.raises(UserError, match=r"step 3: tensor model.layers.1.self_attn.q_proj"):
        refuse_non_finite(chunks, "step 3")
