"""A 7B config whose models are directories with nothing but a config.json."""

from __future__ import annotations

import json
from pathlib import Path

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.planning.plan import Cluster

CONFIGS = Path(__file__).parents[2] / "configs"
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
    return load_config(CONFIGS / "stable_opd_7b.yaml", [*paths, *overrides])
