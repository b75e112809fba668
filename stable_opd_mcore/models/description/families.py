"""The model families that can be built.

A new decoder family is an entry of FAMILIES, and of models/tensors.py if its tensors have other
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """What differs between model types; all have pre-RMSNorm, SwiGLU and RoPE."""

    sglang_class: str  # SGLang's name of the decoder's class, for config.json's "architectures"
    qkv_bias: bool
    qk_norm: bool
    supported: Mapping[str, Any]  # key of config.json -> its only implemented value
    # Key of config.json -> more values with the same meaning as the implemented one
    spellings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Key of config.json -> what a missing one means, where that is not the implemented value
    defaults: Mapping[str, Any] = field(default_factory=dict)
    expert_width: str | None = None  # the key of the experts' width; None: one dense MLP a layer
    shared_expert: bool = False  # every token also passes one more expert
    shared_expert_gate: bool = True  # whose output is multiplied by a gate
    shared_name: str = "shared_expert"  # its module's name
    # How config.json says how many first layers have a dense MLP. counted: first_k_dense_replace.
    # listed: mlp_layer_types, or it is one. None: there are none
    dense_layers: Literal["counted", "listed"] | None = None
    scored_router: bool = False  # sigmoid scores, and a bias that only the choice reads
    latent_attention: bool = False  # keys and values of all heads are made of one latent
    # In a model with other parts: the model_type of its decoder alone. The decoder's settings are
    # then in text_config, and its tensors in model.language_model
    text_type: str | None = None
    full_class: str | None = None  # in a model with other parts: transformers' class of the whole
    # AutoModelForCausalLM gives the decoder by itself, and not the whole
    has_causal_class: bool = False
    # RMSNorm multiplies by 1 + weight, except inside a gated delta net
    zero_centred_norms: bool = False
    norms_after: bool = False  # attention and MLP each have another norm, of their output
    scaled_embedding: bool = False  # embeddings are multiplied by the root of hidden_size
    gelu: bool = False  # the MLP's gate passes GELU's tanh form instead of SiLU
    # Key of config.json -> scores are divided by its root, and not by that of the head's size
    score_divisor: str | None = None
    # Layers with a sliding window have other rotary positions than those with full attention
    typed_rotary: bool = False
    # The output of each query head is multiplied by a gate, whose rows are in q_proj
    gated_attention: bool = False
    rotary_share: float = 1.0  # rotated share of a head's elements, if config.json gives none
    stretched: bool = False  # transformers stretches the window if rope_parameters are absent
    delta_nets: bool = False  # layers of type linear_attention have a gated delta net instead
    # How config.json says which layers read only the last tokens. typed: layer_types names them.
    # patterned: layer_types names them, or all but every n-th do by sliding_window_pattern.
    # switched: layer_types or max_window_layers name them, once use_sliding_window is true.
    # all: every layer does if sliding_window is set.
    sliding_windows: Literal["typed", "patterned", "switched", "all"] | None = None
    attention_bias: bool = False  # config.json's attention_bias gives q, k, v and output a bias
    bias_of_output: bool = True  # it gives one to the output, too
    sinks: bool = False  # each head has a sink (models/layers/attention_sinks.py)
    biases: bool = False  # the attention's output, the router and the experts have biases
    # The bound of an expert's gate and up, whose product is gate · sigmoid(1.702 gate) · (up + 1);
    # None: the product is SwiGLU's, without a bound
    glu_limit: float | None = None
    # Files stack the experts of a layer in one tensor, transposed, with gate and up interleaved
    stacked_experts: bool = False
    # Files hold the delta nets' q, k, v and z in one tensor, by key heads, and b and a in another
    joined_delta_nets: bool = False
    # Prefixes of the tensors of other parts of the model, which are not built but copied on export;
    # {num_layers} stands for the number of layers
    carried: tuple[str, ...] = ()
    # In a model with other parts: what the decoder's names begin with in files, if not as in memory
    file_prefix: str | None = None

    def with_defaults(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The decoder's settings, and the values of the keys that config.json lacks."""
        return {**self.supported, **self.defaults, **settings}

    @property
    def prefix(self) -> str:
        """What the names of the decoder's tensors begin with in files."""
        return self.file_prefix or self._module_prefix

    @property
    def _module_prefix(self) -> str:
        return "model.language_model." if self.text_type else "model."

    def in_module(self, name: str) -> str:
        """The name of one of the files' tensors in transformers' model in memory."""
        return name.replace(self.prefix, self._module_prefix, 1)


_PLAIN = {
    "hidden_act": "silu",
    "is_causal": True,
    "mlp_bias": False,
    "quantization_config": None,
}
_NO_WINDOW = {"use_sliding_window": False}
_WINDOWS: dict[str, Any] = {
    "sliding_windows": "switched",
    "defaults": {"sliding_window": 4096, "max_window_layers": 28},
}
_NO_ATTENTION_BIAS = {"attention_bias": False}
_ALL_LAYERS_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_NO_LAYERS = {"mlp_only_layers": (None,)}
_QWEN3: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": True,
    "attention_bias": True,
}
_HYBRID: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": True,
    "zero_centred_norms": True,
    "gated_attention": True,
    "rotary_share": 0.25,
    "delta_nets": True,
    "spellings": {"output_gate_type": ("silu", "swish")},  # of the norm in a gated delta net
}
_DELTA_NET_GATE = {"output_gate_type": None}
_QWEN3_5: dict[str, Any] = _HYBRID | {
    "supported": _PLAIN
    | _NO_WINDOW
    | _NO_ATTENTION_BIAS
    | _DELTA_NET_GATE
    | {"attn_output_gate": True},
    "carried": ("model.visual.", "mtp."),
}
_GPT_OSS = {
    "attention_bias": True,
    "norm_topk_prob": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_SHARED_EXPERT: dict[str, Any] = {
    "expert_width": "moe_intermediate_size",
    "shared_expert": True,
}
_QWEN3_5_MOE: dict[str, Any] = {
    **_QWEN3_5,
    **_SHARED_EXPERT,
    "supported": _QWEN3_5["supported"] | {"norm_topk_prob": True},
}
_ROUTED: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": False,
    "expert_width": "moe_intermediate_size",
    "shared_expert": True,
    "shared_expert_gate": False,
    "shared_name": "shared_experts",
}
_DEEPSEEK: dict[str, Any] = _ROUTED | {"latent_attention": True}
_DEEPSEEK_PLAIN = _PLAIN | _NO_ATTENTION_BIAS | {"moe_layer_freq": 1}
_SCORED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_NEXT_LAYER = ("model.layers.{num_layers}.",)  # of multi-token prediction
_GEMMA3: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": True,
    "attention_bias": True,
    "zero_centred_norms": True,
    "norms_after": True,
    "scaled_embedding": True,
    "gelu": True,
    "score_divisor": "query_pre_attn_scalar",
    "sliding_windows": "patterned",
    "typed_rotary": True,
    # as in transformers, since published files leave out what is equal there
    "defaults": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "spellings": {"use_bidirectional_attention": (None,)},
}
_GEMMA3_SUPPORTED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "quantization_config": None,
}
FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, supported=_PLAIN, **_WINDOWS),
    "qwen3": Family("Qwen3ForCausalLM", supported=_PLAIN, **_QWEN3, **_WINDOWS),
    "qwen3_vl": Family(
        "Qwen3ForCausalLM",
        text_type="qwen3",
        full_class="Qwen3VLForConditionalGeneration",
        supported=_PLAIN | _NO_WINDOW,
        carried=("model.visual.",),
        **_QWEN3,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        supported=_PLAIN | _NO_WINDOW | _ALL_LAYERS_SPARSE,
        spellings=_NO_LAYERS,
        expert_width="moe_intermediate_size",
        **_QWEN3,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        qkv_bias=False,
        qk_norm=False,
        attention_bias=True,
        supported=_PLAIN | _NO_WINDOW,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        qkv_bias=False,
        qk_norm=False,
        supported=_PLAIN | _NO_WINDOW,
        defaults={"sliding_window": 4096},
        sliding_windows="all",
    ),
    # Qwen3.5, 3.6 and 3.8: as published, and as transformers saves the text model by itself
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM",
        text_type="qwen3_5_text",
        full_class="Qwen3_5ForConditionalGeneration",
        has_causal_class=True,
        **_QWEN3_5,
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", **_QWEN3_5),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        text_type="qwen3_5_moe_text",
        full_class="Qwen3_5MoeForConditionalGeneration",
        has_causal_class=True,
        **_QWEN3_5_MOE,
    ),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", **_QWEN3_5_MOE),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        supported=_PLAIN | _NO_WINDOW | _NO_ATTENTION_BIAS | _ALL_LAYERS_SPARSE | _DELTA_NET_GATE,
        defaults={"norm_topk_prob": True},
        joined_delta_nets=True,
        carried=("mtp.",),
        **_HYBRID | {"spellings": _HYBRID["spellings"] | _NO_LAYERS},
        **_SHARED_EXPERT,
    ),
    # Gemma 3 with a vision tower; the text models are of the type below
    "gemma3": Family(
        "Gemma3ForCausalLM",
        text_type="gemma3_text",
        full_class="Gemma3ForConditionalGeneration",
        supported=_GEMMA3_SUPPORTED | {"tie_word_embeddings": True},
        carried=("vision_tower.", "multi_modal_projector."),
        file_prefix="language_model.model.",
        **_GEMMA3,
    ),
    "gemma3_text": Family("Gemma3ForCausalLM", supported=_GEMMA3_SUPPORTED, **_GEMMA3),
    # Moonlight, and DeepSeek-V3 itself
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        supported=_DEEPSEEK_PLAIN | _SCORED | {"rope_interleave": True},
        defaults={
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
        },
        dense_layers="counted",
        scored_router=True,
        carried=_NEXT_LAYER,
        **_DEEPSEEK,
    ),
    "deepseek_v2": Family(  # only V2-Lite has no groups
        "DeepseekV2ForCausalLM",
        supported=_DEEPSEEK_PLAIN
        | {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
        | {"n_group": None, "topk_group": None},
        spellings={"n_group": (1,), "topk_group": (1,)},
        defaults={"routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        dense_layers="counted",
        **_DEEPSEEK,
    ),
    "glm4_moe_lite": Family(  # GLM-4.7-Flash
        "Glm4MoeLiteForCausalLM",
        supported=_DEEPSEEK_PLAIN
        | _SCORED
        | {"rope_interleave": True, "partial_rotary_factor": 1.0},
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
        },
        dense_layers="listed",
        scored_router=True,
        carried=_NEXT_LAYER,
        **_DEEPSEEK,
    ),
    "glm4_moe": Family(  # GLM-4.5-Air; the larger models have norms of queries and keys
        "Glm4MoeForCausalLM",
        supported=_PLAIN | _NO_WINDOW | _SCORED | {"moe_layer_freq": 1, "use_qk_norm": False},
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
        },
        attention_bias=True,
        bias_of_output=False,
        rotary_share=0.5,
        dense_layers="counted",
        scored_router=True,
        carried=_NEXT_LAYER,
        **_ROUTED,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        qkv_bias=True,
        qk_norm=False,
        supported=_PLAIN | _NO_WINDOW | _GPT_OSS,
        defaults={"rms_norm_eps": 1e-5},
        stretched=True,
        expert_width="intermediate_size",
        sliding_windows="typed",
        sinks=True,
        biases=True,
        glu_limit=7.0,
        stacked_experts=True,
    ),
}
