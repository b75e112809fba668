"""The rotary positions that a config.json asks for, as transformers defines each rope_type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.config_fields import Fields

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RotaryScaling:
    """Stretched rotary frequencies: "linear" divides all of them, "llama3" the low ones."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class Rotary:
    """How queries and keys are rotated."""

    size: int  # the first elements of a head, which are rotated; others stay as they are
    theta: float
    scaling: RotaryScaling | None

    def frequencies(self) -> Tensor:
        """Radians per position, fp32 [size / 2]."""
        import torch  # takes seconds, which plans do without

        exponents = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        frequencies = self.theta**-exponents
        scaling = self.scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        # llama3: stretch wavelengths beyond the original window, keep short ones, blend between.
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths
        blend = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = blend.clamp(0, 1)
        return frequencies * (blend + (1 - blend) / scaling.factor)


def read_rotary(fields: Fields, head_dim: int, share: float) -> Rotary:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Args:
        share: the family's default of `partial_rotary_factor`.

    Raises:
        UserError: a key is missing, contradicts another, or has a value that is not implemented.
    """
    origin = fields.origin
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"{origin}: rope_parameters={given!r} should be an object")
    scaling = fields.get("rope_scaling") or given
    if _kind(scaling) != _kind(given):
        raise UserError(
            f"{origin}: rope_parameters={given} and rope_scaling={scaling} differ; "
            "keep the right one"
        )
    inner = Fields(origin, given)
    holder = inner if "rope_theta" in given else fields
    if holder.get("rope_theta") is None:
        raise UserError(f"{origin}: no rope_theta, nor one in rope_parameters; add it")
    theta = holder.number("rope_theta", 0.0)
    size = _rotated_size(fields, inner, head_dim, share)
    kind = _kind(given)["rope_type"]
    if kind == "default":
        return Rotary(size, theta, None)
    if kind not in ("linear", "llama3"):
        raise UserError(
            f"{origin}: rope_type {kind!r} is not supported; expected default, linear or llama3: "
            "take another model"
        )
    if "factor" not in given:
        raise UserError(f"{origin}: no factor, which rope_type {kind!r} needs; add it")
    original = int(inner.number("original_max_position_embeddings", 8192))
    return Rotary(
        size,
        theta,
        RotaryScaling(
            kind=kind,
            factor=inner.number("factor", 1.0),
            low_freq_factor=inner.number("low_freq_factor", 1.0),
            high_freq_factor=inner.number("high_freq_factor", 4.0),
            original_max_positions=original,
        ),
    )


def _rotated_size(fields: Fields, inner: Fields, head_dim: int, default: float) -> int:
    """Elements of a head that are rotated: all, except in families with another default."""
    key = "partial_rotary_factor"
    if default == 1.0:
        return head_dim
    share = (inner if inner.get(key) is not None else fields).number(key, default)
    size = int(head_dim * share)
    if share > 1 or size < 2 or size % 2:
        raise UserError(
            f"{fields.origin}: {key}={share} of head_dim={head_dim} rotates {size} elements of a "
            "head; expected an even number of them, and at most all; correct config.json"
        )
    return size


# Keys of `rope_parameters` that say nothing about the stretching: the sections are of positions in
# images, and all three positions of a text's token are equal.
_NOT_SCALING = (
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section",
    "mrope_interleaved",
)  # fmt: skip


def _kind(given: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling that `rope_parameters` or `rope_scaling` names, in one spelling."""
    kind = given.get("rope_type", given.get("type", "default"))
    other = {k: v for k, v in given.items() if k not in _NOT_SCALING}
    return {"rope_type": "default" if kind == "mrope" else kind, **other}
