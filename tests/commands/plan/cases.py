"""A 7B config whose models are directories with nothing but a config.json; layers of families."""

import json
from pathlib import Path
from typing import Any

from stable_opd_mcore.commands.plan.known_models import model_source
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.models import ModelConfig
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
# Families -> the end of the path of a model in known_models.yaml; Qwen3-8B for others
PUBLISHED = {
    "qwen2": "Qwen2.5-Math-7B",
    "qwen3_5_text": "Qwen3.5-9B",
    "gpt_oss": "gpt-oss-20b",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "deepseek_v3": "Moonlight-16B-A3B",
    "gemma3": "gemma-3-4b-it",
    "qwen3_next": "Qwen3.5-35B-A3B",
    "qwen3_5_moe_text": "Qwen3.5-35B-A3B",
}
CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": {  # GLM-4.5-Air's at half of its width, with fewer experts
        "hidden_size": 2048,
        "intermediate_size": 5472,
        "moe_intermediate_size": 704,
        "num_attention_heads": 48,
        "attention_bias": True,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    },
    "gemma3": {"sliding_window_pattern": 2},
    "llama": {"hidden_size": 2048, "head_dim": 64, "tie_word_embeddings": True},
}


def layers_of(family: str, layers: int = 4, **fields: Any) -> Architecture:
    """A model of this family with the sizes of a published one."""
    source, _ = model_source(ModelConfig(path=PUBLISHED.get(family, "Qwen3-8B")), "student")
    assert isinstance(source, dict)
    sizes = {"vocab_size": 152065, "max_position_embeddings": TOKENS, "num_hidden_layers": layers}
    fields = source.get("text_config", source) | sizes | CHANGES.get(family, {}) | fields
    if FAMILIES[family].text_type:
        fields = {"text_config": fields}
    return read_architecture({**fields, "model_type": family})


def micro_batch(tokens: int = TOKENS) -> MicroBatch:
    """One sequence."""
    sample = sample_of("rollout", "p", (0,), (0,) * (tokens - 1))
    (batch,) = pack([sample], weights_of([sample]), max_tokens=tokens)
    return batch
