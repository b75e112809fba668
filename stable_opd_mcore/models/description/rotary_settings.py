"""The rotary positions that a config.json asks for, as transformers defines each rope_type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.config_fields import Fields
from stable_opd_mcore.models.description.families import Family
from stable_opd_mcore.models.description.layer_types import FULL, SLIDING

if TYPE_CHECKING:
    from torch import Tensor

_ORIGINAL = "original_max_position_embeddings"
# Of layers with full attention and with a sliding window, where these differ: the key of the base
# outside rope_parameters, and transformers' value if it is absent
_BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
# Keys of YaRN that servers (SGLang, vLLM) read, and transformers does not
_OF_SERVERS = ("attn_factor", "apply_yarn_scaling", "extrapolation_factor")
# rope_type -> the keys of `rope_parameters` that it needs, and those that it also reads
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
_OPTIONAL = {
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        *_OF_SERVERS,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies are stretched, so that a model reads a longer window.

    "linear" divides every frequency by `factor`; "llama3" and "yarn" divide only low frequencies.
    "yarn" also multiplies the attention's scores (Peng et al., "YaRN", 2023, equations 20 to 22).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0  # "llama3"
    high_freq_factor: float = 4.0  # "llama3"
    original_max_positions: int = 8192
    beta_fast: float = 32.0  # "yarn", as are the fields below
    beta_slow: float = 1.0
    truncate: bool = True  # the blend begins and ends at whole indices of frequencies
    attention_factor: float = 1.0  # multiplies queries and keys


@dataclass(frozen=True)
class Rotary:
    """How queries and keys are rotated."""

    size: int  # how many elements of a head are rotated: its first ones
    theta: float
    scaling: RotaryScaling | None

    @property
    def score_factor(self) -> float:
        """What the stretching multiplies scores by."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor**2

    def frequencies(self) -> Tensor:
        """Radians per position, fp32 [size / 2]."""
        import torch  # takes seconds, and plans do not need it

        exponents = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        frequencies = self.theta**-exponents
        scaling = self.scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "yarn":
            kept = _yarn_kept(self, scaling)
            return frequencies * (kept + (1 - kept) / scaling.factor)
        # llama3: stretch wavelengths beyond the original window, keep short ones, blend between.
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths
        blend = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = blend.clamp(0, 1)
        return frequencies * (blend + (1 - blend) / scaling.factor)


def _yarn_kept(rotary: Rotary, scaling: RotaryScaling) -> Tensor:
    """The share of each frequency that is not divided. It is 1 where a frequency turns `beta_fast`
    times or more in the original window, 0 at `beta_slow` times or less, and linear in between."""
    import torch

    def place(turns: float) -> float:
        ratio = scaling.original_max_positions / (turns * 2 * math.pi)
        return rotary.size * math.log(ratio) / (2 * math.log(rotary.theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.size - 1)
    places = torch.arange(rotary.size // 2, dtype=torch.float32)
    return 1 - ((places - low) / (high - low or 0.001)).clamp(0, 1)


def read_rotary(fields: Fields, head_dim: int, share: float, *, must_say: bool = False) -> Rotary:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Args:
        share: the family's default of `partial_rotary_factor`.
        must_say: refuse a config that has neither, which transformers would not read as unscaled.

    Raises:
        UserError: a key is missing, contradicts another, or has a value that is not implemented.
    """
    origin = fields.origin
    given = _given(fields, must_say)
    inner = Fields(origin, given)
    holder = inner if "rope_theta" in given else fields
    if holder.get("rope_theta") is None:
        raise UserError(f"{origin}: no rope_theta, nor one in rope_parameters; add it")
    theta = holder.number("rope_theta", 0.0)
    if theta <= 1:
        raise UserError(f"{origin}: rope_theta={theta:g} should be above 1; correct it")
    kind = _kind(given, origin)["rope_type"]
    size = _rotated_size(fields, inner, head_dim, share, kind)
    if kind == "default":
        return Rotary(size, theta, None)
    for key in _NEEDED[kind]:
        if given.get(key) is None:
            raise UserError(f"{origin}: no {key}, which rope_type {kind!r} needs; add it")
    if kind == "yarn" and size < head_dim:
        raise UserError(
            f"{origin}: rope_type 'yarn' with {size} rotated elements of head_dim={head_dim} is "
            "not supported; expected partial_rotary_factor=1: remove the scaling (the window is "
            "then the original one), or take another model"
        )
    scaling = RotaryScaling(
        kind=kind,
        factor=inner.number("factor", 1.0),
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_max_positions=int(inner.number(_ORIGINAL, 8192)),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=inner.flag("truncate", default=True),
        attention_factor=_attention_factor(inner) if kind == "yarn" else 1.0,
    )
    if kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UserError(
            f"{origin}: low_freq_factor={scaling.low_freq_factor:g} should be below "
            f"high_freq_factor={scaling.high_freq_factor:g}; correct it"
        )
    if kind == "yarn":
        _refuse_another_reading(inner, scaling)
    return Rotary(size, theta, scaling)


def read_latent_rotary(fields: Fields, size: int) -> tuple[Rotary, float]:
    """The rotary positions of a latent attention, of which `size` elements of a head are rotated,
    and what YaRN multiplies all scores by: the square of the factor by mscale_all_dim.

    Raises:
        UserError: as `read_rotary`, or where transformers and servers differ.
    """
    rotary = read_rotary(fields, size, 1.0)
    given = Fields(fields.origin, _given(fields, must_say=False))
    scaling = rotary.scaling
    if given.get("partial_rotary_factor") not in (None, 1) or (
        scaling is not None and scaling.kind != "yarn"
    ):
        raise UserError(
            f"{fields.origin}: rotary positions {dict(given.values)} are not supported for "
            f"{fields.values['model_type']}; expected rope_type 'default' or 'yarn', and "
            "partial_rotary_factor=1: take another model"
        )
    if scaling is None:
        return rotary, 1.0
    both = given.get("mscale"), given.get("mscale_all_dim")
    if bool(both[0]) != bool(both[1]) or given.get("attention_factor") is not None:
        raise UserError(
            f"{fields.origin}: mscale={both[0]!r}, mscale_all_dim={both[1]!r} and attention_factor="
            f"{given.get('attention_factor')!r} of YaRN, which transformers and servers read in "
            "two ways; expected both mscale and mscale_all_dim, or none of the three: correct it"
        )
    if not all(both):
        return rotary, 1.0
    return rotary, _mscale(scaling.factor, given.number("mscale_all_dim", 1.0)) ** 2


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(max(factor, 1.0)) + 1.0


def read_rotaries(fields: Fields, family: Family, head_dim: int) -> tuple[Rotary, Rotary | None]:
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


def of_layers(fields: Fields, kind: str) -> Fields:
    """The fields with the rotary settings of the layers of one type, where the types differ.

    `rope_parameters` has an object for each type. Before transformers 5, `rope_theta` and
    `rope_scaling` were of layers with full attention, and layers with a sliding window had only
    `rope_local_base_freq`.
    """
    values, given = dict(fields.values), fields.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or not given.keys() <= _BASES.keys():
        raise UserError(
            f"{fields.origin}: rope_parameters={given!r:.80} is not supported for "
            f"{values['model_type']}; expected an object for each of {', '.join(_BASES)}: "
            "correct it"
        )
    key, base = _BASES[kind]
    outer = values.pop(key, None)
    if kind == SLIDING:
        values.pop("rope_theta", None)
        values.pop("rope_scaling", None)
    own = _object(Fields(fields.origin, given), kind)
    if outer is None and own.get("rope_theta") is None:
        outer = base
    if outer is not None:
        values["rope_theta"] = outer
    return Fields(fields.origin, {**values, "rope_parameters": own or None})


def _refuse_another_reading(given: Fields, scaling: RotaryScaling) -> None:
    """Raise a UserError where servers would read another model out of `_OF_SERVERS`."""
    if given.get("extrapolation_factor") not in (None, 1):
        raise UserError(
            f"{given.origin}: extrapolation_factor={given.get('extrapolation_factor')!r} is not "
            "supported; expected 1: take another model"
        )
    named = {key: given.get(key) for key in _OF_SERVERS if given.get(key) is not None}
    served = given.number("attn_factor", 1.0) if "attn_factor" in named else 1.0
    if given.flag("apply_yarn_scaling", default=True):
        served *= _attention_factor(Fields(given.origin, {"factor": scaling.factor}))
    if named and not math.isclose(served, scaling.attention_factor, rel_tol=1e-6):
        raise UserError(
            f"{given.origin}: {named} of YaRN, which servers read and transformers does not: they "
            f"multiply queries and keys by {served:.6g}, it by {scaling.attention_factor:.6g}; "
            f"expected one meaning: add attention_factor={served!r} if the servers are right, or "
            "remove these keys"
        )


def _given(fields: Fields, must_say: bool) -> Mapping[str, Any]:
    """`rope_parameters`, or `rope_scaling` in its place; a UserError for values that disagree."""
    given = _object(fields, "rope_parameters") or _object(fields, "rope_scaling")
    if must_say and not given:
        raise UserError(
            f"{fields.origin}: no rope_parameters nor rope_scaling, which transformers then "
            f"invents for a {fields.values['model_type']}; add the model's"
        )
    scaling = _object(fields, "rope_scaling") or given
    named, again = _kind(given, fields.origin), _kind(scaling, fields.origin)
    if named != again or _base(given, fields) != _base(scaling, fields):
        raise UserError(
            f"{fields.origin}: rope_parameters={given} and rope_scaling={scaling} differ; "
            "keep the right one"
        )
    for key in (*_BASE, _ORIGINAL):
        outer, inside = fields.get(key), given.get(key)
        if None not in (outer, inside) and outer != inside:
            raise UserError(
                f"{fields.origin}: {key}={outer!r}, but {inside!r} in rope_parameters or "
                "rope_scaling; keep the right one"
            )
    return given


def _attention_factor(given: Fields) -> float:
    if given.get("attention_factor") is not None:
        return given.number("attention_factor", 1.0)
    factor = given.number("factor", 1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        of_all = _mscale(factor, given.number("mscale_all_dim", 1.0))
        return _mscale(factor, given.number("mscale", 1.0)) / of_all
    return _mscale(factor, 1.0)


def _rotated_size(fields: Fields, inner: Fields, head_dim: int, default: float, kind: str) -> int:
    """Elements of a head that are rotated: all, except in families with another default."""
    key = "partial_rotary_factor"
    holder = inner if inner.get(key) is not None else fields
    share = default if holder.get(key) is None else holder.number(key, default)
    if default == 1.0 and share != 1.0:
        if kind != "default":
            raise UserError(
                f"{fields.origin}: {key}={share} with rope_type {kind!r} is not supported for "
                f"{fields.values['model_type']}; expected 1: take another model"
            )
        share = 1.0  # transformers does not read it either
    size = int(head_dim * share)
    if share > 1 or size < 2 or size % 2:
        raise UserError(
            f"{fields.origin}: {key}={share} of head_dim={head_dim} rotates {size} elements of a "
            "head; expected an even number of them, and at most all; correct it"
        )
    return size


# Keys that say nothing about the stretching: the sections are of positions in images, and all three
# positions of a text's token are equal.
_BASE = ("rope_theta", "partial_rotary_factor")
_NOT_SCALING = ("type", "rope_type", *_BASE, "mrope_section", "mrope_interleaved")


def unread_rotary_settings(
    settings: Mapping[str, Any], *, has_share: bool
) -> Iterator[tuple[str, Any]]:
    """Keys of `rope_parameters` or `rope_scaling` that the rope_type does not read, with values.

    `read_rotary` must have accepted the config. `has_share`: the family reads
    partial_rotary_factor.
    """
    name = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    given = _object(Fields("config.json", settings), name)
    kind = _kind(given, "config.json")
    # Of two ways to give YaRN's attention_factor one is read, and mscale only with mscale_all_dim.
    read = {"rope_type", *_NEEDED[kind["rope_type"]], *_OPTIONAL.get(kind["rope_type"], ())}
    if given.get("attention_factor") or not (given.get("mscale") and given.get("mscale_all_dim")):
        read -= {"mscale", "mscale_all_dim"}
    for key in sorted(kind.keys() - read):
        if given[key] is not None:
            yield f"{name}.{key}", given[key]
    if not has_share and given.get("partial_rotary_factor") not in (None, 1):
        yield f"{name}.partial_rotary_factor", given["partial_rotary_factor"]


def _object(fields: Fields, key: str) -> Mapping[str, Any]:
    """The object under this key of config.json; empty if the key is absent."""
    given = fields.get(key) or {}
    if not isinstance(given, Mapping):
        raise UserError(f"{fields.origin}: {key}={given!r} should be an object")
    for inner, value in given.items():
        if isinstance(value, Mapping):
            raise UserError(
                f"{fields.origin}: {key}.{inner}={value!r:.60} is not supported; expected one "
                "setting for all layers: take another model"
            )
    return given


def _base(given: Mapping[str, Any], fields: Fields) -> tuple[Any, ...]:
    """What `rope_parameters` or `rope_scaling` says of the frequencies before the stretching; the
    decoder's own keys say what it leaves out."""
    return tuple(given.get(key, fields.get(key)) for key in _BASE)


def _kind(given: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The scaling that `rope_parameters` or `rope_scaling` names, in one spelling."""
    named = [given[key] for key in ("rope_type", "type") if given.get(key) is not None]
    kinds = ["default" if kind == "mrope" else kind for kind in named]
    other = {k: v for k, v in given.items() if k not in _NOT_SCALING}
    if not kinds and any(value is not None for value in other.values()):
        raise UserError(
            f"{origin}: {other} without rope_type, which has no effect; add it, or remove these"
        )
    kind = kinds[0] if kinds else "default"
    if kinds[1:] not in ([], [kind]):
        raise UserError(
            f"{origin}: rope_type={named[0]!r} and type={named[1]!r} differ; keep the right one"
        )
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise UserError(
            f"{origin}: rope_type {kind!r} is not supported; expected {', '.join(_NEEDED)}: take "
            "another model"
        )
    return {"rope_type": kind, **other}
