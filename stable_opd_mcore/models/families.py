"""The model families that can be built, and architectures read from Hugging Face's config.json.

A new decoder family is an entry of FAMILIES, and of tensors.py if its tensors have other names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.json_files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Family:
    """What differs between model types; all have pre-RMSNorm, SwiGLU and RoPE."""

    sglang_class: str  # SGLang's name of the model class, for config.json's "architectures"
    qkv_bias: bool
    qk_norm: bool
    supported: Mapping[str, Any]  # the only implemented value of these keys, also their default
    expert_width: str | None = None  # the key of the experts' width; None: one dense MLP a layer


_PLAIN = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
_NO_ATTENTION_BIAS = {"attention_bias": False}
FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, supported=_PLAIN),
    "qwen3": Family(
        "Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, supported=_PLAIN | _NO_ATTENTION_BIAS
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qkv_bias=False,
        qk_norm=True,
        supported=_PLAIN | _NO_ATTENTION_BIAS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        expert_width="moe_intermediate_size",
    ),
    "llama": Family(
        "LlamaForCausalLM", qkv_bias=False, qk_norm=False, supported=_PLAIN | _NO_ATTENTION_BIAS
    ),
}


@dataclass(frozen=True)
class Experts:
    """The MLPs of a layer, of which a router chooses some for each token."""

    number: int
    per_token: int
    normalised: bool  # the probabilities of a token's chosen experts are divided by their sum


@dataclass(frozen=True)
class RotaryScaling:
    """Stretched rotary frequencies: "linear" divides all of them, "llama3" the low ones."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class Architecture:
    """The sizes and settings that define a model."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int  # one expert's in a mixture of experts
    experts: Experts | None  # None: one dense MLP in each layer
    vocab_size: int  # rows of the embedding as stored, which may exceed the tokenizer's
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RotaryScaling | None
    tied: bool  # the output head is the embedding
    initializer_range: float
    source: dict[str, Any] = field(compare=False, repr=False)  # config.json itself, for export

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def layer_products(self) -> int:
        """Multiplications of one token in one layer, without the attention's scores and sums."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        return heads * self.hidden_size + self.mlp_products

    @property
    def mlp_products(self) -> int:
        """Multiplications of one token in one layer's MLP, by its experts and the router."""
        mlp = 3 * self.ffn_hidden_size * self.hidden_size
        if self.experts is None:
            return mlp
        return self.experts.per_token * mlp + self.experts.number * self.hidden_size

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence whose causal attention multiplies as much as the rest of a layer."""
        return self.layer_products / (self.num_attention_heads * self.head_dim)


def read_architecture(
    source: str | Path | Mapping[str, Any],
    *,
    window: int | None = None,
    rope_theta: float | None = None,
) -> Architecture:
    """Read a model directory, a config.json, or its fields given inline.

    Args:
        window, rope_theta: replace those of the config, also in `Architecture.source`.

    Raises:
        UserError: no such file, not JSON, unknown model_type, a key missing or with a value that
            is not implemented. The message names the file and the key.
    """
    origin, fields = read_fields(source)
    fields = _changed(fields, window, rope_theta)
    model_type = _supported_type(origin, fields)
    count = partial(_count, origin, fields)
    heads, groups, head_dim = _heads(origin, fields)
    family = FAMILIES[model_type]
    theta, scaling = _rotary(origin, fields)
    return Architecture(
        model_type=model_type,
        num_layers=count("num_hidden_layers"),
        hidden_size=count("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        ffn_hidden_size=count(family.expert_width or "intermediate_size"),
        experts=_experts(origin, fields) if family.expert_width else None,
        vocab_size=count("vocab_size"),
        max_positions=count("max_position_embeddings"),
        rms_norm_eps=_number(origin, fields, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(fields.get("tie_word_embeddings", False)),
        initializer_range=_number(origin, fields, "initializer_range", 0.02),
        source=dict(fields),
    )


def layout_refusal(
    architecture: Architecture,
    tensor: int,
    pipeline: int,
    num_chunks: int = 1,
    *,
    expert: int = 1,
    sequence: bool = True,
) -> str | None:
    """Why these ranks, with `num_chunks` on each stage, cannot hold the model; None if they can."""
    experts = architecture.experts
    heads = ("num_attention_heads", "num_key_value_heads")
    for name in heads if experts is not None else (*heads, "ffn_hidden_size"):
        number = getattr(architecture, name)
        if number % tensor:
            return (
                f"parallel.tensor={tensor} does not divide {name}={number} of this "
                f"{architecture.model_type} model: choose a tensor size among "
                f"{_divisors(architecture.num_key_value_heads)}"
            )
    stages = pipeline * num_chunks
    if architecture.num_layers % stages:
        return (
            f"{architecture.num_layers} layers do not divide into parallel.pipeline={pipeline} x "
            f"parallel.virtual_pipeline={num_chunks} = {stages} stages: choose a product among "
            f"{_divisors(architecture.num_layers)}"
        )
    if experts is None:
        return None
    if experts.number % expert:
        return (
            f"parallel.expert={expert} does not divide the {experts.number} experts of this "
            f"{architecture.model_type} model: choose among {_divisors(experts.number)}"
        )
    if tensor > 1 and not sequence:
        return (
            f"parallel.tensor={tensor} with parallel.sequence=false: every tensor rank would send "
            f"the same tokens to the experts of this {architecture.model_type} model; set "
            "parallel.sequence=true"
        )
    return None


def _supported_type(origin: str, fields: Mapping[str, Any]) -> str:
    """The model_type, where the config switches nothing on that its family lacks."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"{origin}: model_type {model_type!r} is not supported; "
            f"take a model of one of these types: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    for key, wanted in family.supported.items():
        if fields.get(key, wanted) != wanted:
            raise UserError(
                f"{origin}: {key}={fields[key]!r} is not supported for {model_type}; "
                f"expected {wanted!r}; correct config.json if the weights are not of that kind, "
                "else take another model"
            )
    layers = fields.get("layer_types") or ()
    if any(layer != "full_attention" for layer in layers):
        raise UserError(
            f"{origin}: layer_types={sorted(set(map(str, layers)))} is not supported for "
            f"{model_type}; expected full_attention in every layer: take another model"
        )
    return model_type


def _heads(origin: str, fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Attention heads, heads of keys and values, and the size of one."""
    heads = _count(origin, fields, "num_attention_heads")
    hidden = _count(origin, fields, "hidden_size")
    if fields.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"{origin}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}: "
            "set head_dim"
        )
    groups = _count(origin, fields, "num_key_value_heads", heads)
    if heads % groups:
        raise UserError(
            f"{origin}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={groups}; correct config.json"
        )
    return heads, groups, fields.get("head_dim") or hidden // heads


def _experts(origin: str, fields: Mapping[str, Any]) -> Experts:
    # transformers 5 writes num_local_experts; published files have num_experts.
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    number = _count(origin, fields, key)
    per_token = _count(origin, fields, "num_experts_per_tok")
    if per_token > number:
        raise UserError(
            f"{origin}: num_experts_per_tok={per_token} exceeds num_experts={number}; correct "
            "config.json"
        )
    return Experts(number, per_token, normalised=bool(fields.get("norm_topk_prob", False)))


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """Radians per position, fp32 [head_dim / 2], as transformers defines each rope_type."""
    import torch  # takes seconds, which plans do without

    size = architecture.head_dim
    frequencies = architecture.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: stretch wavelengths beyond the original window, keep short ones, blend between.
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def read_fields(source: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The fields of a config.json, unchecked, and its name for errors.

    Raises:
        UserError: no such file, too large a one, or no JSON object in it.
    """
    if isinstance(source, Mapping):
        return "architecture", source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; give a model directory, with config.json and safetensors"
        )
    if path.suffix != ".json":
        raise UserError(f"{path}: a file; give a directory with config.json and safetensors")
    return str(path), read_json_object(path)


def _changed(
    fields: Mapping[str, Any], window: int | None, rope_theta: float | None
) -> Mapping[str, Any]:
    changed = dict(fields)
    if window is not None:
        changed["max_position_embeddings"] = window
    if rope_theta is not None:
        holders = [
            key
            for key in ("rope_parameters", "rope_scaling")
            if isinstance(changed.get(key), dict) and "rope_theta" in changed[key]
        ]
        for key in holders:
            changed[key] = {**changed[key], "rope_theta": rope_theta}
        if "rope_theta" in changed or not holders:
            changed["rope_theta"] = rope_theta
    return changed


def _count(origin: str, fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    if value is None:
        raise UserError(f"{origin}: no {key}, which a {fields['model_type']} config needs; add it")
    if type(value) is not int or value < 1:
        raise UserError(f"{origin}: {key}={value!r} should be a positive whole number")
    return value


def _number(origin: str, fields: Mapping[str, Any], key: str, default: float) -> float:
    value = fields.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{origin}: {key}={value!r} should be a positive number")
    return float(value)


def _rotary(origin: str, fields: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"{origin}: rope_parameters={given!r} should be an object")
    scaling = fields.get("rope_scaling") or given
    if _rotary_kind(scaling) != _rotary_kind(given):
        raise UserError(
            f"{origin}: rope_parameters={given} and rope_scaling={fields['rope_scaling']} differ; "
            "keep the right one"
        )
    holder = given if "rope_theta" in given else fields
    if holder.get("rope_theta") is None:
        raise UserError(f"{origin}: no rope_theta, nor one in rope_parameters; add it")
    theta = _number(origin, holder, "rope_theta", 0.0)
    kind = _rotary_kind(given)["rope_type"]
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise UserError(
            f"{origin}: rope_type {kind!r} is not supported; expected default, linear or llama3: "
            "take another model"
        )
    if "factor" not in given:
        raise UserError(f"{origin}: no factor, which rope_type {kind!r} needs; add it")
    return theta, RotaryScaling(
        kind=kind,
        factor=_number(origin, given, "factor", 1.0),
        low_freq_factor=_number(origin, given, "low_freq_factor", 1.0),
        high_freq_factor=_number(origin, given, "high_freq_factor", 4.0),
        original_max_positions=int(
            _number(origin, given, "original_max_position_embeddings", 8192)
        ),
    )


def _rotary_kind(given: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling that `rope_parameters` or `rope_scaling` names, in one spelling."""
    kind = given.get("rope_type", given.get("type", "default"))
    other = {k: v for k, v in given.items() if k not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": kind, **other}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
