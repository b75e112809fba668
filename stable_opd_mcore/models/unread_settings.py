"""Settings of a config.json that nothing here reads and that may change a model's outputs."""

from collections.abc import Mapping
from typing import Any

from stable_opd_mcore.models.families import FAMILIES

# Keys that models/families.py reads, in addition to those of each family.
_READ = {
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "num_experts", "num_local_experts",
    "num_experts_per_tok", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "initializer_range",
    "norm_topk_prob", "layer_types",
}  # fmt: skip
# Keys that change no logit: of files, of generation, of training and outputs in transformers.
# A sliding window is off unless use_sliding_window is true.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "attention_dropout",
    "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "sliding_window",
    "max_window_layers", "return_dict", "output_attentions", "output_hidden_states", "id2label",
    "label2id", "problem_type", "is_decoder", "chunk_size_feed_forward", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed",
}  # fmt: skip


def unread_keys(fields: Mapping[str, Any]) -> list[str]:
    """Keys of a readable config.json that switch something on which is not computed here."""
    family = FAMILIES[fields["model_type"]]
    known = {*_READ, *_WITHOUT_EFFECT, *family.supported, family.expert_width}
    return sorted(key for key, value in fields.items() if value and key not in known)
