"""Architectures, read from Hugging Face's config.json by what families.py says of their family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.config_fields import (
    READ_OUTSIDE,
    Fields,
    decoder_settings,
    is_mxfp4,
    read_fields,
)
from stable_opd_mcore.models.description.expert_settings import Experts, read_experts
from stable_opd_mcore.models.description.families import FAMILIES, Family
from stable_opd_mcore.models.description.layer_types import (
    FULL,
    LINEAR,
    SLIDING,
    layers_of_type,
    read_dense_layers,
    read_layer_types,
)
from stable_opd_mcore.models.description.mixer_settings import (
    DeltaNet,
    Latent,
    read_delta_net,
    read_latent,
)
from stable_opd_mcore.models.description.rotary_settings import (
    Rotary,
    RotaryScaling,
    read_rotaries,
)
from stable_opd_mcore.models.description.unread_settings import read_keys

# Two names of one setting. transformers reads one of them, or the one that comes last in the file.
_SYNONYMS = (("num_experts", "num_local_experts"), ("num_experts_per_tok", "experts_per_token"))


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
    num_dense_layers: int  # first layers of a mixture of experts that have one dense MLP
    mlp_width: int  # of a dense MLP
    vocab_size: int  # rows of the embedding as stored, which may exceed the tokenizer's
    max_positions: int
    rms_norm_eps: float
    rotary: Rotary  # but for local_layers
    local_rotary: Rotary | None  # of local_layers; None: there are none
    local_layers: tuple[int, ...]  # indices, from 0, of the layers with other rotary positions
    score_divisor: float | None  # scores are divided by its root; None: head_dim
    latent: Latent | None  # sizes of its attention if keys and values are made of a latent
    tied: bool  # the output head is the embedding
    initializer_range: float
    attention_bias: bool  # queries, keys, values and output have biases by config.json
    delta_net: DeltaNet | None  # sizes of its gated delta nets; None: it has none
    delta_layers: tuple[int, ...]  # indices, from 0, of the layers with a gated delta net
    sliding_window: int | None  # tokens, itself included, that a token reads in sliding_layers
    sliding_layers: tuple[int, ...]  # indices, from 0, of the layers with a sliding window
    mxfp4: bool = field(compare=False)  # its files hold the experts in MXFP4; an export never does
    source: dict[str, Any] = field(compare=False, repr=False)  # config.json, completed, for export

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.family.qkv_bias or self.attention_bias

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output has a bias."""
        given = self.attention_bias and self.family.bias_of_output
        return self.family.biases or given

    @property
    def softmax_scale(self) -> float | None:
        """What scores are multiplied by; None: 1/sqrt(head_dim)."""
        if self.latent is not None:
            return self.latent.score_factor / math.sqrt(self.head_dim)
        factor = self.rotary.score_factor
        if factor == 1.0 and self.score_divisor in (None, self.head_dim):
            return None
        return factor / math.sqrt(self.score_divisor or self.head_dim)

    def rotaries(self) -> list[Rotary]:
        """The rotary positions of a model's layers; those of local_layers are the second."""
        return [self.rotary, *([] if self.local_rotary is None else [self.local_rotary])]

    @property
    def carried(self) -> tuple[str, ...]:
        """Prefixes of the tensors of other parts of the model, which an export copies."""
        return tuple(each.format(num_layers=self.num_layers) for each in self.family.carried)

    @property
    def has_unlike_layers(self) -> bool:
        """Whether layers have parameters of other names or shapes."""
        return self.delta_net is not None or self.num_dense_layers > 0

    def kinds(self, layers: Iterable[int] | None = None) -> dict[int, int]:
        """A layer of each kind, and how many of `layers` are of its kind; None: of all."""
        alike: dict[tuple[bool, bool], list[int]] = {}
        for n in range(self.num_layers) if layers is None else layers:
            alike.setdefault((n in self.delta_layers, n < self.num_dense_layers), []).append(n)
        return {numbers[0]: len(numbers) for numbers in alike.values()}

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - len(self.delta_layers)

    @property
    def products(self) -> int:
        """Multiplications of one token in all layers, without the attention's scores and sums."""
        heads = (2 + self.family.gated_attention) * self.num_attention_heads
        attention = (heads + 2 * self.num_key_value_heads) * self.head_dim * self.hidden_size
        if self.latent is not None:
            latent, queries = self.latent, self.latent.query_rank or self.hidden_size
            up = queries * self.head_dim + latent.rank * (latent.plain_dim + latent.value_dim)
            attention = self.num_attention_heads * (up + latent.value_dim * self.hidden_size)
            down = latent.rank + latent.rotated_dim + (latent.query_rank or 0)
            attention += self.hidden_size * down
        mixers = self.num_attention_layers * attention
        if (net := self.delta_net) is not None:
            # The gates z and the outputs are as wide as the values; decay and beta have a column
            # for each value head. A token reads the state twice and writes it once.
            widths = net.channels + 2 * net.values + 2 * net.num_value_heads
            layer = widths * self.hidden_size + 3 * net.values * net.key_dim
            mixers += len(self.delta_layers) * layer
        return mixers + self.mlp_products

    @property
    def dense_width(self) -> int:
        """Width of the MLP that every token passes: a layer's only one, or its shared expert."""
        return self.ffn_hidden_size if self.experts is None else self.experts.shared_width or 0

    @property
    def router_rows(self) -> int:
        """Rows of a layer's router, and of the gate of its shared expert."""
        if self.experts is None:
            return 0
        return self.experts.number + (self.dense_width > 0 and self.family.shared_expert_gate)

    @property
    def mlp_products(self) -> int:
        """Multiplications of one token in all MLPs, by experts and routers."""
        chosen = 0 if self.experts is None else self.experts.per_token * self.ffn_hidden_size
        each = 3 * (self.dense_width + chosen) + self.router_rows
        dense = 3 * self.mlp_width * self.num_dense_layers
        return ((self.num_layers - self.num_dense_layers) * each + dense) * self.hidden_size

    @property
    def score_products(self) -> int:
        """Multiplications of one token with another in one layer's attention."""
        return self.num_attention_heads * (self.head_dim + self.value_dim)

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence whose causal attention multiplies as much as the rest of a layer."""
        unlimited = self.num_attention_layers - len(self.sliding_layers)
        if not unlimited:
            return math.inf
        return self.products / (unlimited * self.score_products / 2)


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
    origin, settings = read_fields(source)
    family = _family(origin, settings)
    settings = _changed(settings, window, rope_theta)
    mxfp4 = family.stacked_experts and is_mxfp4(settings)
    if mxfp4:
        settings = {key: each for key, each in settings.items() if key != "quantization_config"}
    fields = Fields(origin, family.with_defaults(decoder_settings(settings)))
    _refuse_unsupported(fields, family)
    latent = None
    if family.latent_attention:
        latent, rotary = read_latent(fields)
        heads = groups = fields.count("num_attention_heads")
        head_dim, local_rotary = latent.plain_dim + latent.rotated_dim, None
        _refuse_groups(fields, heads)
    else:
        heads, groups, head_dim = _heads(fields)
        rotary, local_rotary = read_rotaries(fields, family, head_dim)
    _refuse_disagreements(fields, family, settings, rotary.scaling)
    types, max_positions = read_layer_types(fields, family), fields.count("max_position_embeddings")
    delta_layers, sliding_layers = layers_of_type(LINEAR, types), layers_of_type(SLIDING, types)
    local_layers = sliding_layers if local_rotary is not None else ()
    if sliding_layers and fields.count("sliding_window") >= max_positions:
        sliding_layers = ()  # no token is out of the window
    eps = fields.number("rms_norm_eps", 1e-6)
    tied = fields.flag("tie_word_embeddings")
    # To transformers a missing key may mean another value than it does here.
    written_out = {"num_key_value_heads": groups, "rms_norm_eps": eps}
    if latent is None:
        written_out["head_dim"] = head_dim
    width = fields.count(family.expert_width or "intermediate_size")
    num_dense = read_dense_layers(fields, family) if family.expert_width else 0
    return Architecture(
        model_type=fields.values["model_type"],
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=fields.count("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        ffn_hidden_size=width,
        num_dense_layers=num_dense,
        mlp_width=fields.count("intermediate_size") if num_dense else width,
        experts=read_experts(fields, family) if family.expert_width else None,
        vocab_size=fields.count("vocab_size"),
        max_positions=max_positions,
        rms_norm_eps=eps,
        rotary=rotary,
        local_rotary=local_rotary if local_layers else None,
        local_layers=local_layers,
        score_divisor=(
            fields.number(family.score_divisor, head_dim) if family.score_divisor else None
        ),
        tied=tied,
        initializer_range=fields.number("initializer_range", 0.02),
        latent=latent,
        attention_bias=family.attention_bias and fields.flag("attention_bias"),
        delta_net=read_delta_net(fields) if delta_layers else None,
        delta_layers=delta_layers,
        sliding_window=fields.count("sliding_window") if sliding_layers else None,
        sliding_layers=sliding_layers,
        mxfp4=mxfp4,
        source={"tie_word_embeddings": tied, **_completed(settings, written_out)},
    )


def _family(origin: str, settings: Mapping[str, Any]) -> Family:
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"{origin}: model_type {model_type!r} is not supported; "
            f"take a model of one of these types: {', '.join(sorted(FAMILIES))}"
        )
    if FAMILIES[model_type].text_type and not isinstance(settings.get("text_config"), Mapping):
        raise UserError(f"{origin}: no text_config, which a {model_type} config needs; add it")
    if FAMILIES[model_type].text_type is None and settings.get("text_config"):
        raise UserError(
            f"{origin}: text_config, which a {model_type} config does not have; remove it, or "
            "correct model_type"
        )
    return FAMILIES[model_type]


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """Raise a UserError for a setting that switches something on which the family lacks."""
    model_type = fields.values["model_type"]
    for key, wanted in family.supported.items():
        found = fields.values[key]
        if found != wanted and found not in family.spellings.get(key, ()):
            raise UserError(
                f"{fields.origin}: {key}={found!r} is not supported for {model_type}; "
                f"expected {wanted!r}; correct it if the weights are not of that kind, "
                "else take another model"
            )


def _refuse_disagreements(
    fields: Fields, family: Family, settings: Mapping[str, Any], scaling: RotaryScaling | None
) -> None:
    """Raise a UserError for two values of one setting, by two names or in and outside text_config,
    of which transformers may read the other."""
    pairs = [(a, fields.get(a), b, fields.get(b)) for a, b in _SYNONYMS]
    if scaling is not None:
        original, again = "original_max_position_embeddings", "initial_context_length"
        pairs.append((original, scaling.original_max_positions, again, fields.get(again)))
    if family.text_type:
        text = settings["text_config"]
        outside = read_keys(family) & settings.keys() - {"initializer_range", *READ_OUTSIDE}
        given = {key: text[key] for key in outside if text.get(key) is not None}
        pairs += [(f"text_config.{k}", given.get(k, "absent"), k, settings[k]) for k in outside]
    for first, value, second, other in sorted(pairs, key=str):
        if None not in (value, other) and value != other:
            raise UserError(
                f"{fields.origin}: {first}={value!r:.60} and {second}={other!r:.60} differ; keep "
                "the right one, or make them equal"
            )


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Attention heads, heads of keys and values, and the size of one."""
    origin = fields.origin
    head_dim = None if fields.get("head_dim") is None else fields.count("head_dim")
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    if head_dim is None and hidden % heads:
        raise UserError(
            f"{origin}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}: "
            "set head_dim"
        )
    groups = fields.count("num_key_value_heads", heads)
    if heads % groups:
        raise UserError(
            f"{origin}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={groups}; correct it"
        )
    return heads, groups, head_dim or hidden // heads


def _refuse_groups(fields: Fields, heads: int) -> None:
    if fields.get("num_key_value_heads", heads) not in (None, heads):
        raise UserError(
            f"{fields.origin}: num_key_value_heads={fields.get('num_key_value_heads')!r:.60} is "
            f"not supported for {fields.values['model_type']}; expected num_attention_heads="
            f"{heads}, since every head has keys and values of its own: correct it"
        )


def _completed(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the decoder's keys that it lacks."""
    if "text_config" in settings:
        return {**settings, "text_config": _completed(settings["text_config"], values)}
    given = {key: value for key, value in settings.items() if value is not None}
    return {**settings, **values, **given}


def _changed(
    settings: Mapping[str, Any], window: int | None, rope_theta: float | None
) -> Mapping[str, Any]:
    if "text_config" in settings:
        return {**settings, "text_config": _changed(settings["text_config"], window, rope_theta)}
    changed = dict(settings)
    if window is not None:
        changed["max_position_embeddings"] = window
    if rope_theta is not None:
        of_types = changed.get("rope_parameters")
        if isinstance(of_types, dict) and isinstance(full := of_types.get(FULL), dict):
            given = {**full, "rope_theta": rope_theta}
            return {**changed, "rope_parameters": {**of_types, FULL: given}}
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
