"""Parameter counts and saved activations against Megatron's own models in a fake world.

Torch's layers keep more for the backward pass than Transformer Engine's, which are counted: up to
three times as much, and six times in gated delta nets and between norms in fp32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.commands.rehearse.fake_tensors import fake_tensors
from stable_opd_mcore.commands.rehearse.fake_world import fake_world
from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.adapted import adapted_shapes, last_name
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, forward_hidden
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.lora import adapt
from stable_opd_mcore.placement.layout import layout_of
from stable_opd_mcore.placement.model_size import ModelSize
from tests.commands.plan.cases import layers_of, micro_batch

LAYOUTS = [  # family, tensor, pipeline, context, sequence, precision, recompute
    ("qwen2", 1, 1, 1, False, "fp32", "none"),
    ("qwen2", 2, 1, 1, False, "bf16", "none"),
    ("qwen2", 4, 1, 1, True, "bf16", "full"),
    ("qwen2", 4, 1, 1, True, "bf16", "selective"),
    ("qwen2", 4, 1, 2, True, "bf16", "none"),
    ("qwen2", 4, 4, 1, True, "bf16", "none"),
    ("qwen3", 8, 1, 1, True, "bf16", "none"),
    ("qwen3", 8, 2, 1, True, "bf16", "none"),
    ("qwen3", 4, 1, 1, True, "bf16", "selective"),
    ("qwen3_vl", 2, 4, 1, False, "fp32", "none"),
    ("llama", 4, 2, 1, True, "bf16", "full"),
    ("llama", 1, 1, 1, False, "bf16", "none"),
    ("qwen3_5_text", 4, 1, 1, True, "bf16", "selective"),
    ("qwen3_5_text", 2, 2, 1, True, "bf16", "none"),
    ("qwen3_5_text", 1, 4, 1, False, "fp32", "full"),
    ("qwen3_next", 2, 1, 1, True, "bf16", "selective"),
    ("gemma3", 4, 2, 1, True, "bf16", "none"),
    ("glm4_moe_lite", 2, 2, 1, True, "bf16", "none"),
    ("deepseek_v3", 1, 1, 1, False, "bf16", "selective"),
    ("glm4_moe", 2, 1, 1, True, "bf16", "selective"),
    ("gemma3", 1, 1, 1, False, "bf16", "full"),
    ("gemma3", 2, 1, 1, True, "bf16", "selective"),
    ("qwen3_next", 2, 2, 1, True, "bf16", "none"),
    ("qwen3_5_moe_text", 1, 2, 1, False, "bf16", "none"),
]


@contextmanager
def built(
    architecture: Architecture, parallel: ParallelConfig, gpus: int, rank: int, **options: Any
) -> Iterator[list[HiddenStatesGPTModel]]:
    """The chunks of a rank."""
    with fake_world(parallel, gpus=gpus, rank=rank) as world, fake_tensors():
        yield build_model(architecture, world, **{"precision": "bf16", "seed": None, **options})


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "context", "sequence", "precision", "recompute"), LAYOUTS
)
def test_sizes_are_those_of_the_built_model(
    family, tensor, pipeline, context, sequence, precision, recompute
):
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, context=context, sequence=sequence)
    element = 2 if precision == "bf16" else 4
    architecture = layers_of(family, num_experts=16, n_routed_experts=16)  # built quickly
    size = ModelSize(architecture, layout_of(parallel, 64), element=element)
    options = {"precision": precision, "recompute": recompute}
    for rank, stage in ((0, 0), (63, pipeline - 1)):
        with built(architecture, parallel, 64, rank, **options) as chunks:
            counted = sum(p.numel() for chunk in chunks for p in chunk.parameters())
            assert counted == size.stage_parameters(stage)
            if context > 1 or rank > 0:
                continue
            per_token = size.saved_by_layers(recompute, stage)
            per_token += size.saved_outside_layers(pipeline == 1)
            # delta nets work off a sequence in a loop; windows and latents store scores
            is_plain = not (
                architecture.delta_net or architecture.sliding_layers or architecture.latent
            )
            tokens, most = (4096, 3) if is_plain else (512, 6)
            assert 1 < saved_for_backward(chunks[0], tokens) / (per_token * tokens) < most


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "expert"),
    [
        ("qwen3_moe", 1, 1, 1),
        ("qwen3_moe", 1, 2, 8),
        ("qwen3_moe", 2, 1, 16),
        ("qwen3_moe", 4, 4, 2),
        ("gpt_oss", 1, 1, 1),
        ("gpt_oss", 2, 2, 8),
    ],
)
def test_every_expert_is_counted_on_the_ranks_that_hold_it(family, tensor, pipeline, expert):
    width = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    architecture = layers_of(family, num_experts=32, num_experts_per_tok=4, **{width: 700})
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, expert=expert, sequence=tensor > 1)
    size = ModelSize(architecture, layout_of(parallel, 64))
    for rank, stage in ((0, 0), (63, pipeline - 1)):
        with built(architecture, parallel, 64, rank) as chunks:
            weights = [weight for chunk in chunks for weight in chunk.parameters()]
            assert sum(weight.numel() for weight in weights) == size.stage_parameters(stage)
    one_expert = 3 * 700 * architecture.hidden_size
    if architecture.family.biases:
        one_expert += 2 * 700 + architecture.hidden_size
    unchosen = size.total_parameters() - size.read_parameters(1)
    assert unchosen == pytest.approx(4 * (32 - 4) * one_expert)
    assert size.read_parameters(1000) == pytest.approx(size.total_parameters())
    assert size.expert_parameters(0) * expert * pipeline == 4 * 32 * one_expert


def cut_model(family: str, expert: int) -> tuple[Architecture, ParallelConfig]:
    """A model of eight layers and its layout on eight ranks, each with two pieces of a stage."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"n_routed_experts": 8, "num_local_experts": 8}  # the names of DeepSeek and gpt-oss
    return layers_of(family, layers=8, **experts), ParallelConfig(
        tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, expert=expert
    )


@pytest.mark.parametrize(
    ("family", "expert"),
    [("qwen2", 1), ("qwen3_moe", 2), ("qwen3_5_text", 1), ("qwen3_next", 2), ("glm4_moe_lite", 2)],
)
def test_matrices_in_fp8_are_those_that_the_built_model_rounds(family, expert):
    architecture, parallel = cut_model(family, expert)
    size = ModelSize(architecture, layout_of(parallel, 8))
    fp8 = Fp8("teacher", "tensorwise")
    for rank in (0, 7):
        with built(architecture, parallel, 8, rank, fp8=fp8) as chunks:
            modules = [module for chunk in chunks for module in chunk.modules()]
            weights = [m.weight for m in modules if getattr(m, "rounding", None)]
            stage = 0 if rank == 0 else 1
            assert sum(w.numel() for w in weights) == size.fp8_parameters(stage)


@pytest.mark.parametrize(
    ("family", "expert"),
    [
        ("qwen2", 1),
        ("qwen3_moe", 2),
        ("qwen3_5_text", 1),
        ("qwen3_next", 2),
        ("gpt_oss", 2),
        ("glm4_moe_lite", 2),
    ],
)
@pytest.mark.parametrize("matrices", [None, ("v_proj", "gate_proj", "in_proj_z", "down_proj")])
def test_low_rank_factors_are_those_of_the_built_model(family, expert, matrices):
    known = set(map(last_name, adapted_shapes(cut_model(family, expert)[0])))
    matrices = matrices and tuple(known & {*matrices, "in_proj_qkvz", "gate_up_proj"})
    lora = LoraConfig(rank=6, alpha=1.0, expert_rank=3, matrices=matrices)
    architecture, parallel = cut_model(family, expert)
    size = ModelSize(architecture, layout_of(parallel, 8))
    with built(architecture, parallel, 8, 7) as chunks:
        adapt(chunks, lora)
        found = sum(weight.numel() for f in factors_of(chunks) for weight in f.parameters())
    assert found == size.factor_parameters(lora, stage=7 % 2) + size.expert_factor_parameters(
        lora, stage=1
    )


def saved_for_backward(chunk: HiddenStatesGPTModel, tokens: int) -> int:
    """Bytes that one forward pass of a sequence keeps, parameters excluded."""
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # or their memory would be used again, under the same address

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    parameters = {p.untyped_storage()._cdata for p in chunk.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward_hidden(chunk, micro_batch(tokens))
    return sum(size for storage, size in saved.items() if storage not in parameters)
