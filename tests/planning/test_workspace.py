"""What one layer holds while it is computed, against Megatron's own layers in a fake world."""

from collections.abc import Callable

import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.gpt import Recompute, build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, forward_hidden
from stable_opd_mcore.planning.layout import layout_of
from stable_opd_mcore.planning.model_size import ModelSize
from stable_opd_mcore.planning.workspace import (
    backward_bytes,
    forward_bytes,
    gathered_input_bytes,
)
from stable_opd_mcore.records import MicroBatch
from stable_opd_mcore.rehearsal.fake_tensors import fake_tensors
from stable_opd_mcore.rehearsal.fake_world import fake_world
from tests.planning.cases import TOKENS, layers_of, micro_batch

EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
LAYOUTS = [  # family, tensor, sequence, recompute, expert
    ("qwen2", 1, False, "none", 1),
    ("qwen2", 4, False, "none", 1),
    ("qwen2", 4, True, "none", 1),
    ("qwen2", 4, True, "selective", 1),
    ("qwen2", 2, False, "full", 1),
    ("qwen3", 8, True, "full", 1),
    ("qwen3_moe", 1, False, "none", 8),
    ("qwen3_moe", 2, True, "full", 4),
]


@pytest.mark.parametrize(("family", "tensor", "sequence", "recompute", "expert"), LAYOUTS)
def test_the_peak_of_a_pass_is_that_of_the_built_layers(
    family, tensor, sequence, recompute, expert
):
    architecture = layers_of(family, vocab_size=1024, **EXPERTS)
    parallel = ParallelConfig(tensor=tensor, pipeline=2, sequence=sequence, expert=expert)
    size = ModelSize(architecture, layout_of(parallel, 16), is_torch=True)

    def peak(run: Callable[[HiddenStatesGPTModel, MicroBatch], None], how: Recompute) -> int:
        with fake_world(parallel, gpus=16) as world, fake_tensors() as live:
            options = {"precision": "bf16", "seed": None, "trainable": run is forward_and_backward}
            (chunk,) = build_model(architecture, world, recompute=how, **options)
            live.restart()
            before = live.bytes
            run(chunk, micro_batch())
            return live.peak_bytes - before

    outside = TOKENS * size.saved_outside_layers(False)
    planned = forward_bytes(size, TOKENS) + outside
    assert peak(forward, "none") == pytest.approx(planned, rel=0.05)

    output = TOKENS * 2 * architecture.hidden_size / size.norm_ranks
    planned = size.layers_per_stage * TOKENS * size.saved_bytes(recompute) + outside
    planned += output + gathered_input_bytes(size, TOKENS)
    planned += backward_bytes(size, recompute, TOKENS)
    assert peak(forward_and_backward, recompute) == pytest.approx(planned, rel=0.03)


def forward(chunk: HiddenStatesGPTModel, batch: MicroBatch) -> None:
    with torch.no_grad():
        forward_hidden(chunk, batch)


def forward_and_backward(chunk: HiddenStatesGPTModel, batch: MicroBatch) -> None:
    """Gradients of weights are dropped; the trainer adds them to buffers that it has already."""
    for weight in chunk.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    output = forward_hidden(chunk, batch)
    torch.autograd.backward(output, torch.empty_like(output))
