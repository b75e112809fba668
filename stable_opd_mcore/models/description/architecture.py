"""Architectures, read from Hugging Face's config.json by what families.py says of their family."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from stable_opd_mcore.models.description.families import FAMILIES, Family
from stable_opd_mcore.models.description.layer_types import (
    FULL,
    LINEAR,
    SLIDING,
    layers_of_type,
    read_dense_layers,
    read_layer_types,
)
from stable_opd_mcore.models.description.rotary_settings import (
    Rotary,
    RotaryScaling,
    of_layers,
    read_latent_rotary,
    read_rotary,
)
from stable_opd_mcore.models.description.unread_settings import read_keys

# Two names of one setting. transformers reads one of them, or the one that comes last in the file.
_SYNONYMS = (("num_experts", "num_local_experts"), ("num_experts_per_tok", "experts_per_token"))


@dataclass(frozen=True)
class Experts:
    """The MLPs of a layer, of which a router chooses some for each token."""

    number: int
    per_token: int
    normalised: bool  # the probabilities of a token's chosen experts are divided by their sum
    shared_width: int | None  # width of the expert that every token passes; None: no such expert
    scale: float = 1.0  # what the probabilities are multiplied by
    num_groups: int = 1  # of equally many experts; a token's experts are of its best groups
    groups_per_token: int = 1


@dataclass(frozen=True)
class Latent:
    """The sizes of a multi-head latent attention."""

    query_rank: int | None  # width of the latent of queries; None: they are made of the token
    rank: int  # width of the latent of keys and values
    plain_dim: int  # elements of a query or key that are not rotated
    rotated_dim: int  # elements that are, which all heads' keys share
    value_dim: int
    score_factor: float  # what YaRN multiplies scores by
    rotated_factor: float  # what it multiplies the share of the rotated elements by


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net. A key head serves equally many value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # size of one key head
    value_dim: int  # size of one value head
    conv_width: int  # tokens that the convolution reads

    @property
    def values_per_key(self) -> int:
        """Value heads of one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of queries, keys and values, over which the convolution runs."""
        return 2 * self.keys + self.values


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
            attention = self.latent_matrices(1) + self.num_attention_heads * (
                self.value_dim * self.hidden_size
            )
        mixers = self.num_attention_layers * attention
        if (net := self.delta_net) is not None:
            # The gates z and the outputs are as wide as the values; decay and beta have a column
            # for each value head. A token reads the state twice and writes it once.
            widths = net.channels + 2 * net.values + 2 * net.num_value_heads
            layer = widths * self.hidden_size + 3 * net.values * net.key_dim
            mixers += len(self.delta_layers) * layer
        return mixers + self.mlp_products

    def latent_matrices(self, tensor: int) -> int:
        """Elements, on one of so many tensor ranks, of a layer's matrices that make queries, keys
        and values, where these come of latents."""
        latent, heads = self.latent, self.num_attention_heads // tensor
        assert latent is not None
        queries = latent.query_rank or self.hidden_size
        down = self.hidden_size * (latent.rank + latent.rotated_dim + (latent.query_rank or 0))
        up = queries * self.head_dim + latent.rank * (latent.plain_dim + latent.value_dim)
        return down + heads * up

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
        latent, rotary = _latent(fields)
        heads = groups = fields.count("num_attention_heads")
        head_dim, local_rotary = latent.plain_dim + latent.rotated_dim, None
        _refuse_groups(fields, heads)
    else:
        heads, groups, head_dim = _heads(fields)
        rotary, local_rotary = _rotaries(fields, family, head_dim)
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
        experts=_experts(fields, family) if family.expert_width else None,
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
        delta_net=_delta_net(fields) if delta_layers else None,
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
                f"expected {wanted!r}; correct config.json if the weights are not of that kind, "
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


def _delta_net(fields: Fields) -> DeltaNet:
    net = DeltaNet(
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim"),
    )
    if net.num_value_heads % net.num_key_heads:
        raise UserError(
            f"{fields.origin}: linear_num_value_heads={net.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={net.num_key_heads}; correct config.json"
        )
    return net


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
            f"num_key_value_heads={groups}; correct config.json"
        )
    return heads, groups, head_dim or hidden // heads


def _latent(fields: Fields) -> tuple[Latent, Rotary]:
    """The sizes of a latent attention, and the rotary positions of its rotated elements."""
    size = fields.count("qk_rope_head_dim")
    if fields.get("head_dim", size) not in (None, size):
        raise UserError(
            f"{fields.origin}: head_dim={fields.get('head_dim')!r:.60} and qk_rope_head_dim={size} "
            "differ, which transformers reads as one; remove head_dim"
        )
    rotary, score_factor = read_latent_rotary(fields, size)
    has_none = "q_lora_rank" in fields.values and fields.get("q_lora_rank") is None
    latent = Latent(
        query_rank=None if has_none else fields.count("q_lora_rank"),
        rank=fields.count("kv_lora_rank"),
        plain_dim=fields.count("qk_nope_head_dim"),
        rotated_dim=size,
        value_dim=fields.count("v_head_dim"),
        score_factor=score_factor,
        rotated_factor=rotary.score_factor,
    )
    return latent, rotary


def _refuse_groups(fields: Fields, heads: int) -> None:
    if fields.get("num_key_value_heads", heads) not in (None, heads):
        raise UserError(
            f"{fields.origin}: num_key_value_heads={fields.get('num_key_value_heads')!r:.60} is "
            f"not supported for {fields.values['model_type']}; expected num_attention_heads="
            f"{heads}, since every head has keys and values of its own: correct config.json"
        )


def _rotaries(fields: Fields, family: Family, head_dim: int) -> tuple[Rotary, Rotary | None]:
    """The rotary positions, and those of layers with a sliding window where these differ."""
    share = family.rotary_share
    if not family.typed_rotary:
        return read_rotary(fields, head_dim, share, must_say=family.stretched), None
    local = read_rotary(of_layers(fields, SLIDING), head_dim, share)
    if local.scaling is not None:
        raise UserError(
            f"{fields.origin}: rope_type {local.scaling.kind!r} of {SLIDING} is not supported for "
            f"{fields.values['model_type']}, where servers read 'default'; take another model"
        )
    full = read_rotary(of_layers(fields, FULL), head_dim, share)
    if full.score_factor != 1.0:
        raise UserError(
            f"{fields.origin}: rope_type 'yarn' of {FULL} is not supported for "
            f"{fields.values['model_type']}: it multiplies the scores of these layers alone; take "
            "another model, or remove the scaling (the window is then the original one)"
        )
    return full, local


def _experts(fields: Fields, family: Family) -> Experts:
    # transformers 5 writes num_local_experts; published files have num_experts.
    key = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    if family.shared_name == "shared_experts":  # DeepSeek's names
        key = "n_routed_experts"
    number = fields.count(key)
    per_token = fields.count("num_experts_per_tok")
    if per_token > number:
        raise UserError(
            f"{fields.origin}: num_experts_per_tok={per_token} exceeds {key}={number}; "
            "correct config.json"
        )
    normalised = fields.flag("norm_topk_prob")
    if per_token == 1 and normalised:
        always = family.supported.get("norm_topk_prob") is True
        why = f"which every {fields.values['model_type']} does" if always else "norm_topk_prob=true"
        raise UserError(
            f"{fields.origin}: num_experts_per_tok=1 is not supported where the weights of a "
            f"token's experts are divided by their sum ({why}): the weight of the only one is 1 "
            "whatever the router says, which is then not trained; take another model"
        )
    if family.shared_name == "shared_experts":
        shared = fields.count("n_shared_experts") * fields.count("moe_intermediate_size")
        scale = fields.number("routed_scaling_factor", 1.0)
        groups = _groups(fields, number, per_token) if family.scored_router else (1, 1)
        return Experts(number, per_token, normalised, shared, scale, *groups)
    return Experts(
        number,
        per_token,
        normalised=normalised,
        shared_width=(
            fields.count("shared_expert_intermediate_size") if family.shared_expert else None
        ),
    )


def _groups(fields: Fields, number: int, per_token: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token's experts are of."""
    groups, best = fields.count("n_group"), fields.count("topk_group")
    fits = number % groups == 0 and best <= groups and per_token <= best * (number // groups)
    if groups > 1 and not (fits and number // groups > 1):
        raise UserError(
            f"{fields.origin}: n_group={groups} and topk_group={best} do not suit "
            f"n_routed_experts={number} and num_experts_per_tok={per_token}: expected groups of "
            "equally many experts, two at least, and in topk_group of them as many as a token "
            "has; correct config.json"
        )
    return groups, best


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
