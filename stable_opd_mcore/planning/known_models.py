"""The published config.json of the models that the shipped configs name.

`plan` and `rehearse` need a model's sizes and no weights, so they also work where the models are
not downloaded. A directory that exists always counts more than this table. Not here: weights,
tokenizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stable_opd_mcore.config.schema import ModelConfig
from stable_opd_mcore.errors import UserError

_QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "initializer_range": 0.02}
_QWEN2_1P5B = {
    **_QWEN2,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_QWEN2_7B = {
    **_QWEN2,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_QWEN2_32B = {
    **_QWEN2,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_QWEN3_8B = {
    **_QWEN3,
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_QWEN3_32B = {
    **_QWEN3,
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_QWEN3_30B_A3B = {
    **_QWEN3_MOE,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
}
_QWEN3_235B_A22B = {
    **_QWEN3_MOE,
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
_MATH = {"max_position_embeddings": 4096, "rope_theta": 10000.0}
# The supervised runs write these: their configs set student.window and student.rope_theta.
_LONG_MATH = {"max_position_embeddings": 16384, "rope_theta": 40000.0}
_INSTRUCT = {"max_position_embeddings": 32768, "rope_theta": 1000000.0}
# By the end of the path.
_MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-1.5B": {**_QWEN2_1P5B, **_MATH},
    "sft_1p5b/model": {**_QWEN2_1P5B, **_LONG_MATH},
    "Qwen2.5-Math-7B": {**_QWEN2_7B, **_MATH},
    "sft_7b/model": {**_QWEN2_7B, **_LONG_MATH},
    "cold_start_1p5b/model": {**_QWEN2_1P5B, **_LONG_MATH},
    "dr_grpo_1p5b/model": {**_QWEN2_1P5B, **_LONG_MATH},
    # The models of configs/baselines/, trained from Qwen2.5-Math-7B but for one from Qwen2.5-7B.
    "Qwen2.5-Math-1.5B-Instruct": {**_QWEN2_1P5B, **_MATH},
    "Qwen2.5-Math-7B-Instruct": {**_QWEN2_7B, **_MATH},
    "Qwen2.5-Math-7B-SimpleRL-Zero": {**_QWEN2_7B, **_MATH},
    "Qwen2.5-Math-7B-Oat-Zero": {**_QWEN2_7B, **_MATH},
    "Eurus-2-7B-PRIME-Zero": {**_QWEN2_7B, **_MATH},
    "Open-Reasoner-Zero-7B": {
        **_QWEN2_7B,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    },
    "Qwen2.5-7B-Instruct": {**_QWEN2_7B, **_INSTRUCT},
    "OpenThinker3-7B": {**_QWEN2_7B, **_INSTRUCT},
    "DeepSeek-R1-Distill-Qwen-7B": {
        **_QWEN2_7B,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
    },
    "Qwen2.5-32B-SFT": {**_QWEN2_32B, **_INSTRUCT},
    "OpenThinker3-32B": {**_QWEN2_32B, **_INSTRUCT},
    "Qwen3-8B": _QWEN3_8B,
    "Qwen3-32B": _QWEN3_32B,
    "Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen3-235B-A22B": _QWEN3_235B_A22B,
}


def model_source(model: ModelConfig, name: str) -> tuple[str | dict[str, Any], str | None]:
    """What `read_architecture` reads, and a note where it comes from this table.

    Args:
        name: of the config's section.

    Raises:
        UserError: no such directory, and no such model in the table.
    """
    if model.architecture is not None:
        return model.architecture, None
    assert model.path is not None, "the schema asks for one of the two"
    if Path(model.path).exists():
        return model.path, None
    for suffix, fields in _MODELS.items():
        if Path(model.path).as_posix().endswith(f"/{suffix}") or model.path == suffix:
            return fields, f"{name}.path={model.path} is absent: sizes as published for this model"
    raise UserError(
        f"{name}.path={model.path}: no such directory; a plan needs only its config.json "
        f"(set {name}.path to a directory that holds it)"
    )
