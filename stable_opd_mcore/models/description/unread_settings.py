"""Settings of a config.json that nothing here reads and that may change a model's outputs."""

from collections.abc import Mapping
from typing import Any

from stable_opd_mcore.models.description.config_fields import Fields, decoder_settings
from stable_opd_mcore.models.description.families import FAMILIES, Family
from stable_opd_mcore.models.description.layer_types import FULL, SLIDING
from stable_opd_mcore.models.description.rotary_settings import of_layers, unread_rotary_settings

# Keys that the files of this folder read, in addition to those of each family.
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
_READ_OF_LATENTS = {
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
}  # fmt: skip
_READ_OF_DEEPSEEKS_EXPERTS = {
    "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group",
    "first_k_dense_replace",
}  # fmt: skip
# Keys that change no logit of a text. They are about files, generation, training and outputs in
# transformers, images, multi-token prediction, or a server's state.
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp",
    "router_aux_loss_coef", "output_router_logits", "return_dict", "output_attentions",
    "output_hidden_states", "id2label", "label2id", "problem_type", "is_decoder",
    "chunk_size_feed_forward", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed", "vision_config",
    "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype",
    "experts_per_token", "initial_context_length", "auto_map", "cache_implementation",
    "num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim", "aux_loss_alpha", "seq_aux",
    "ep_size", "image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image",
}  # fmt: skip
# A sliding window of Qwen's is off unless use_sliding_window is true; Llama has no such switch.
_WINDOWS = {"sliding_window", "max_window_layers"}
# Values that mean the same as no such key: what older releases of transformers wrote into every
# file, and switches of other code that are off
_SAME_AS_ABSENT = {
    "add_cross_attention": False, "attention_dropout": 0, "decoder_sparse_step": 1,
    "diversity_penalty": 0, "do_sample": False, "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "is_encoder_decoder": False, "length_penalty": 1,
    "max_length": 20, "min_length": 0, "mlp_only_layers": [], "no_repeat_ngram_size": 0,
    "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "output_scores": False,
    "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1,
    "return_dict_in_generate": False, "rope_interleaved": False, "temperature": 1,
    "tf_legacy_loss": False, "tie_encoder_decoder": False, "top_k": 50, "top_p": 1,
    "torchscript": False, "typical_p": 1, "use_bfloat16": False, "use_mrope": False,
}  # fmt: skip

_HEADS = ("ForCausalLM", "ForConditionalGeneration")  # ends of the classes with a language head


def read_keys(family: Family) -> set[str]:
    """Keys of the decoder that architecture.py reads for this family, but for those of which only
    one value is implemented."""
    keys = _READ | {family.expert_width} if family.expert_width else set(_READ)
    keys |= _READ_OF_DELTA_NETS if family.delta_nets else set()
    keys |= {"partial_rotary_factor"} if family.rotary_share != 1.0 else set()
    keys |= _READ_OF_LATENTS if family.latent_attention else set()
    if family.shared_name == "shared_experts":
        keys |= _READ_OF_DEEPSEEKS_EXPERTS
        keys |= {"mlp_layer_types"} if family.dense_layers == "listed" else set()
    elif family.shared_expert:
        keys |= {"shared_expert_intermediate_size"}
    keys |= {"attention_bias"} if family.attention_bias else set()
    keys |= {"sliding_window"} if family.sliding_windows else set()
    keys |= {family.score_divisor} if family.score_divisor else set()
    keys |= {"rope_local_base_freq"} if family.typed_rotary else set()
    if family.sliding_windows == "patterned":
        keys |= {"sliding_window_pattern", "_sliding_window_pattern"}
    switch = {"use_sliding_window", "max_window_layers"}
    return keys | (switch if family.sliding_windows == "switched" else set())


def unread_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a readable config.json that may ask for something that is not computed here, and
    their values. null asks for nothing; false may switch off what is on here."""
    family, settings = FAMILIES[fields["model_type"]], decoder_settings(fields)
    known = {*WITHOUT_EFFECT, *family.supported, *read_keys(family)}
    if fields["model_type"] != "llama" or settings.get("use_sliding_window") is not None:
        known |= _WINDOWS
    found = {
        key: value
        for key, value in settings.items()
        if value is not None and key not in known and value != _SAME_AS_ABSENT.get(key)
    }
    given = Fields("config.json", settings)
    kinds = [of_layers(given, kind) for kind in (FULL, SLIDING)] if family.typed_rotary else [given]
    for each in kinds:
        found |= unread_rotary_settings(each.values, has_share=family.rotary_share != 1.0)
    classes, stem = settings.get("architectures"), family.sglang_class.removesuffix(_HEADS[0])
    if isinstance(classes, list) and not any(
        str(name).startswith(stem) and str(name).endswith(_HEADS) for name in classes
    ):
        found |= {"architectures": classes} if classes else {}
    tied, text = "tie_word_embeddings", fields.get("text_config") or {}
    if text.get(tied) not in (None, fields.get(tied, False)):
        found[f"text_config.{tied}"] = text[tied]
    own_code = settings.get("auto_map")
    if isinstance(own_code, Mapping) and any(name.startswith("AutoModel") for name in own_code):
        found["auto_map"] = own_code
    return dict(sorted(found.items()))
