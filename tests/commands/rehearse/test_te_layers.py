"""Transformer Engine's layers have the parameters of torch's, and a difference is named."""

import pytest

from stable_opd_mcore.commands.rehearse import te_layers
from stable_opd_mcore.commands.rehearse.fake_tensors import fake_tensors
from stable_opd_mcore.commands.rehearse.fake_world import fake_world
from stable_opd_mcore.commands.rehearse.te_layers import compare_layers, differing, facts
from stable_opd_mcore.config.load import load_config
from tests.commands.plan.cases import CONFIGS

QWEN3 = ["student.architecture.model_type=qwen3", "student.architecture.head_dim=16"]
EXPERTS = [
    "student.architecture.model_type=qwen3_moe",
    "student.architecture.head_dim=16",
    "student.architecture.num_experts=8",
    "student.architecture.num_experts_per_tok=2",
    "student.architecture.moe_intermediate_size=48",
    "student.architecture.norm_topk_prob=true",
]
LATENTS = [
    "student.architecture.model_type=glm4_moe_lite",
    "student.architecture.n_routed_experts=8",
    "student.architecture.num_experts_per_tok=2",
    "student.architecture.n_shared_experts=1",
    "student.architecture.moe_intermediate_size=48",
    "student.architecture.routed_scaling_factor=1.8",
    "student.architecture.q_lora_rank=32",
    "student.architecture.kv_lora_rank=32",
    "student.architecture.qk_nope_head_dim=32",
    "student.architecture.qk_rope_head_dim=16",
    "student.architecture.v_head_dim=32",
]
FP8 = ["train.precision=bf16", "fp8.student=blockwise", "fp8.reference=tensorwise"]
TENSOR = ["parallel.tensor=2", "parallel.sequence=true"]


@pytest.mark.skipif(
    not te_layers.is_installed(), reason="Transformer Engine is for a cluster's environment"
)
@pytest.mark.parametrize(
    "overrides",
    [
        [*TENSOR, "parallel.pipeline=2"],
        [*QWEN3, *TENSOR, *FP8],
        [*EXPERTS, *TENSOR, "parallel.expert=4", *FP8],
        [*LATENTS, *TENSOR, "parallel.expert=2", "train.precision=bf16"],
    ],
    ids=["qwen2", "qwen3, FP8", "experts, FP8", "latents"],
)
def test_transformer_engines_layers_have_the_parameters_of_torchs(overrides: list[str]) -> None:
    config = load_config(CONFIGS / "smoke_cpu.yaml", overrides)
    ranks = [0, 4] if config.parallel.pipeline == 2 else [7]
    assert "built, with the parameters" in compare_layers(config, 8, ranks)


def test_a_missing_parameter_and_another_shape_are_named() -> None:
    config = load_config(CONFIGS / "smoke_cpu.yaml", [*EXPERTS, "parallel.expert=2"])
    with fake_world(config.parallel, 4, rank=3) as world, fake_tensors():
        plain = facts(config, world, "student", fused=False)
        assert differing(facts(config, world, "student", fused=True), plain) == []
    name = "model.layers.1.post_attention_layernorm.weight"
    saved = "saved decoder.layers.pre_mlp_layernorm.weight at (1, 0)"
    shape, *others = plain[name]
    changed = {**plain, name: ((shape[0] * 2,), *others)}
    del changed[saved]
    missing, wider = sorted(differing(changed, plain), reverse=True)
    assert missing.startswith(f"{saved}: absent, with torch ((64,), (2, 64)")
    assert wider.startswith(f"{name}: ((128,), ")
