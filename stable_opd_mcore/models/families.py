"""The model families that can be built, and architectures read from Hugging Face's config.json.

A new dense decoder family is an entry of FAMILIES and, if its tensors have other names, entries of
the table in tensors.py. Not here: weights, Megatron, transformers; a config is plain JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stable_opd_mcore.errors import UserError


@dataclass(frozen=True)
class Family:
    """What differs between model types; all have pre-RMSNorm, SwiGLU and RoPE."""

    sglang_class: str  # SGLang's name of the model class, for config.json's "architectures"
    qkv_bias: bool
    qk_norm: bool
    supported: Mapping[str, Any]  # the only implemented value of these keys, also their default


_PLAIN = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
_NO_ATTENTION_BIAS = {"attention_bias": False}
FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, supported=_PLAIN),
    "qwen3": Family(
        "Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, supported=_PLAIN | _NO_ATTENTION_BIAS
    ),
    "llama": Family(
        "LlamaForCausalLM", qkv_bias=False, qk_norm=False, supported=_PLAIN | _NO_ATTENTION_BIAS
    ),
}


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
    ffn_hidden_size: int
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
        return (heads + 3 * self.ffn_hidden_size) * self.hidden_size

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence whose causal attention multiplies as much as all else in a layer.

        A token multiplies with keys and values of half the sequence, in the mean.
        """
        return self.layer_products / (self.num_attention_heads * self.head_dim)


def read_architecture(source: str | Path | Mapping[str, Any]) -> Architecture:
    """Read a model directory, a config.json, or its fields given inline.

    Raises:
        UserError: no such file, not JSON, unknown model_type, a key missing or with a value that
            is not implemented. The message names the file and the key.
    """
    origin, fields = _fields(source)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"{origin}: model_type {model_type!r} is not supported; "
            f"known: {', '.join(sorted(FAMILIES))}"
        )
    for key, wanted in FAMILIES[model_type].supported.items():
        if fields.get(key, wanted) != wanted:
            raise UserError(
                f"{origin}: {key}={fields[key]!r} is not supported for {model_type}; "
                f"expected {wanted!r}"
            )

    def count(key: str, default: int | None = None) -> int:
        value = fields.get(key, default)
        if value is None:
            raise UserError(f"{origin}: key {key} is missing; a {model_type} config needs it")
        if type(value) is not int or value < 1:
            raise UserError(f"{origin}: {key}={value!r} should be a positive whole number")
        return value

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    if fields.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"{origin}: hidden_size={hidden} is no multiple of num_attention_heads={heads}: "
            "set head_dim"
        )
    groups = count("num_key_value_heads", heads)
    if heads % groups:
        raise UserError(
            f"{origin}: num_attention_heads={heads} is no multiple of num_key_value_heads={groups}"
        )
    theta, scaling = _rotary(origin, fields)
    return Architecture(
        model_type=model_type,
        num_layers=count("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=fields.get("head_dim") or hidden // heads,
        ffn_hidden_size=count("intermediate_size"),
        vocab_size=count("vocab_size"),
        max_positions=count("max_position_embeddings"),
        rms_norm_eps=_number(origin, fields, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(fields.get("tie_word_embeddings", False)),
        initializer_range=_number(origin, fields, "initializer_range", 0.02),
        source=dict(fields),
    )


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """Radians per position, fp32 [head_dim / 2], as transformers defines each rope_type."""
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


def _fields(source: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "architecture", source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; a model directory holds config.json and safetensors"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno} is not JSON: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:  # unreadable, not UTF-8, nested too deep
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: expected a JSON object with the model's settings")
    return str(path), fields


def _number(origin: str, fields: Mapping[str, Any], key: str, default: float) -> float:
    value = fields.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{origin}: {key}={value!r} should be a positive number")
    return float(value)


def _rotary(origin: str, fields: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"{origin}: rope_parameters={given!r} should be an object")
    holder = given if "rope_theta" in given else fields
    if holder.get("rope_theta") is None:
        raise UserError(f"{origin}: key rope_theta is missing (also not in rope_parameters)")
    theta = _number(origin, holder, "rope_theta", 0.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise UserError(
            f"{origin}: rope_type {kind!r} is not supported; expected default, linear or llama3"
        )
    if "factor" not in given:
        raise UserError(f"{origin}: rope_type {kind!r} needs the key factor")
    return theta, RotaryScaling(
        kind=kind,
        factor=_number(origin, given, "factor", 1.0),
        low_freq_factor=_number(origin, given, "low_freq_factor", 1.0),
        high_freq_factor=_number(origin, given, "high_freq_factor", 4.0),
        original_max_positions=int(
            _number(origin, given, "original_max_position_embeddings", 8192)
        ),
    )
