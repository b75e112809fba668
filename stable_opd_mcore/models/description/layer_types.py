"""What mixes the tokens in each layer, by the `layer_types` of config.json."""

from __future__ import annotations

from collections.abc import Sequence

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.config_fields import Fields

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"


def read_layer_types(
    fields: Fields, *, delta_nets: bool, sliding_windows: bool
) -> tuple[str, ...] | None:
    """The type of each layer; None: all have full attention.

    Args:
        delta_nets, sliding_windows: whether the family may have a gated delta net (LINEAR) or a
            sliding window (SLIDING) in some layers.

    Raises:
        UserError: a type that the family lacks, another number of layers, or none with FULL.
    """
    known = {FULL} | ({LINEAR} if delta_nets else set()) | ({SLIDING} if sliding_windows else set())
    given = fields.get("layer_types")
    if not isinstance(given, list | tuple | None):
        raise UserError(f"{fields.origin}: layer_types={given!r:.60} should be a list; correct it")
    found = set(map(str, given or ()))
    if not found <= known:
        raise UserError(
            f"{fields.origin}: layer_types={sorted(found)} is not supported for "
            f"{fields.values['model_type']}; expected {' or '.join(sorted(known))} in every layer: "
            "take another model"
        )
    if known == {FULL}:
        return None
    number = fields.count("num_hidden_layers")
    types = _usual_types(fields, number, delta_nets=delta_nets) if given is None else given
    if len(types) != number or FULL not in types:
        raise UserError(
            f"{fields.origin}: layer_types has {len(types)} layers, {types.count(FULL)} of "
            f"them {FULL}; expected {number} (num_hidden_layers), at least one of them "
            f"{FULL}: correct config.json"
        )
    return tuple(types)


def _usual_types(fields: Fields, number: int, *, delta_nets: bool) -> list[str]:
    """transformers' default: every second or fourth layer, or as configured, has full attention."""
    every = fields.count("full_attention_interval", 4) if delta_nets else 2
    other = LINEAR if delta_nets else SLIDING
    return [FULL if (i + 1) % every == 0 else other for i in range(number)]


def layers_of_type(kind: str, types: Sequence[str] | None) -> tuple[int, ...]:
    """Indices, from 0, of the layers of one type."""
    return tuple(i for i, each in enumerate(types or ()) if each == kind)
