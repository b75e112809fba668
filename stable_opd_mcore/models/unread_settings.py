"""Settings of a config.json that nothing here reads and that may change a model's outputs."""

from collections.abc import Mapping
from typing import Any

from stable_opd_mcore.models.config_fields import decoder_settings
from stable_opd_mcore.models.family import FAMILIES
from stable_opd_mcore.models.rotary_settings import unread_rotary_settings

# Keys that models/families.py reads, in addition to those of each family.
_READ = {
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "num_experts", "num_local_experts",
    "num_experts_per_tok", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "initializer_range",
    "norm_topk_prob", "layer_types",
}  # fmt: skip
_READ_OF_DELTA_NETS = {
    "full_attention_interval", "partial_rotary_factor", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
}  # fmt: skip
# Keys that change no logit of a text. They are about files, generation, training and outputs in
# transformers, images, multi-token prediction, or a server's state.
# A sliding window is off unless use_sliding_window is true.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "attention_dropout",
    "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "sliding_window",
    "max_window_layers", "return_dict", "output_attentions", "output_hidden_states", "id2label",
    "label2id", "problem_type", "is_decoder", "chunk_size_feed_forward", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed",
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "mamba_ssm_dtype", "experts_per_token", "initial_context_length",
}  # fmt: skip


def unread_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a readable config.json that switch something on which is not computed here, and
    their values."""
    family = FAMILIES[fields["model_type"]]
    known = {*_READ, *_WITHOUT_EFFECT, *family.supported, family.expert_width, "auto_map"}
    known |= _READ_OF_DELTA_NETS if family.delta_nets else set()
    known |= {"shared_expert_intermediate_size"} if family.shared_expert else set()
    settings = decoder_settings(fields)
    found = {key: value for key, value in settings.items() if value and key not in known}
    found |= unread_rotary_settings(settings, has_share=family.rotary_share != 1.0)
    own_code = settings.get("auto_map")
    if isinstance(own_code, Mapping) and any(name.startswith("AutoModel") for name in own_code):
        found["auto_map"] = own_code
    return dict(sorted(found.items()))
