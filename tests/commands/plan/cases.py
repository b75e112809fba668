"""A 7B config whose models are directories with nothing but a config.json; shapes of layers."""

import json
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.description.families import FAMILIES
from stable_opd_mcore.placement.hardware import Cluster
from stable_opd_mcore.records import MicroBatch
from tests.config.cases import layered
from tests.shares import sample_of, weights_of

CONFIGS = Path(__file__).parents[3] / "configs"
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 16384,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
NODE = Cluster(nodes=1, gpus_per_node=8)


def config_7b(directory: Path, *overrides: str) -> Config:
    (directory / "config.json").write_text(json.dumps(QWEN_7B))
    paths = [f"student.path={directory}", f"teacher.path={directory}"]
    return load_config(CONFIGS / "stable_opd_7b.yaml", layered(*paths, *overrides))


TOKENS = 4096
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    "qwen3": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
    },
    "qwen3_5_text": {  # Qwen3.5-4B's
        "hidden_size": 2560,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "gpt_oss": {  # gpt-oss-20b's
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "qwen3_next": {  # Qwen3-Next-80B-A3B's and Qwen3.5-35B-A3B's, with a quarter of the experts
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 128,
        "num_experts_per_tok": 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "glm4_moe_lite": {  # GLM-4.7-Flash's, with half of the experts
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    },
    "deepseek_v3": {  # Moonlight's, with half of the experts
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "glm4_moe": {  # GLM-4.5-Air's at half of its width, with fewer experts
        "hidden_size": 2048,
        "intermediate_size": 5472,
        "moe_intermediate_size": 704,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    },
    "gemma3": {  # Gemma 3 4B's, whose decoder has an object of its own
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10240,
        "sliding_window": 1024,
        "sliding_window_pattern": 2,
    },
    "llama": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
}


def layers_of(family: str, layers: int = 4, **fields: Any) -> Architecture:
    """A model of this family's shapes; experts have Qwen3's."""
    fields = {"vocab_size": 152065, "max_position_embeddings": TOKENS, "rope_theta": 1e4} | fields
    is_mixed = family in ("qwen3_next", "qwen3_5_moe_text")
    shapes = SHAPES["qwen3_next"] if is_mixed else SHAPES.get(family, SHAPES["qwen3"])
    fields = {"num_hidden_layers": layers, **shapes, **fields}
    if FAMILIES[family].text_type:
        fields = {"text_config": fields}
    return read_architecture({"model_type": family, **fields})


def micro_batch(tokens: int = TOKENS) -> MicroBatch:
    """One sequence."""
    sample = sample_of("rollout", "p", (0,), (0,) * (tokens - 1))
    (batch,) = pack([sample], weights_of([sample]), max_tokens=tokens)
    return batch
