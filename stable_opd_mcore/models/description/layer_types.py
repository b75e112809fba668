"""What mixes the tokens in each layer, by the `layer_types` of config.json."""

from __future__ import annotations

from collections.abc import Sequence

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.config_fields import Fields
from stable_opd_mcore.models.description.families import Family

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"


def read_layer_types(fields: Fields, family: Family) -> tuple[str, ...] | None:
    """The type of each layer; None: all have full attention.

    Raises:
        UserError: a type that the family lacks, another number of layers, or none with FULL where
            a family has other layers among these.
    """
    number = fields.count("num_hidden_layers")
    if family.sliding_windows == "all":
        kind = FULL if fields.get("sliding_window") is None else SLIDING
        _read(fields, {kind})
        return None if kind == FULL else (SLIDING,) * number
    is_switched = family.sliding_windows == "switched"
    slides = fields.flag("use_sliding_window") if is_switched else bool(family.sliding_windows)
    slides = slides and (not is_switched or fields.get("sliding_window") is not None)
    known = {FULL} | ({LINEAR} if family.delta_nets else set()) | ({SLIDING} if slides else set())
    given = _read(fields, known)
    if known == {FULL}:
        return None
    types = _usual_types(fields, number, family) if given is None else given
    if len(types) != number or (FULL not in types and not is_switched):
        raise UserError(
            f"{fields.origin}: layer_types has {len(types)} layers, {types.count(FULL)} of "
            f"them {FULL}; expected {number} (num_hidden_layers), at least one of them "
            f"{FULL}: correct it"
        )
    return tuple(types)


def _read(fields: Fields, known: set[str]) -> Sequence[str] | None:
    """The list in config.json, of known types."""
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
    return given


def _usual_types(fields: Fields, number: int, family: Family) -> list[str]:
    """transformers' default: every second, fourth or sixth layer, or as configured, has full
    attention."""
    if family.sliding_windows == "switched":
        first = fields.whole("max_window_layers")
        return [SLIDING if i >= first else FULL for i in range(number)]
    every = 2
    if family.delta_nets:
        every = fields.count("full_attention_interval", 4)
    elif family.sliding_windows == "patterned":
        every = fields.count("sliding_window_pattern", 6)
    other = LINEAR if family.delta_nets else SLIDING
    return [FULL if (i + 1) % every == 0 else other for i in range(number)]


def read_dense_layers(fields: Fields, family: Family) -> int:
    """How many first layers of a mixture of experts have one dense MLP.

    Raises:
        UserError: `mlp_layer_types` and `first_k_dense_replace` differ; dense layers after others;
            no layer with experts.
    """
    number, said = fields.count("num_hidden_layers"), fields.get("first_k_dense_replace")
    if family.dense_layers is None:
        return 0
    first = 1 if family.dense_layers == "listed" else fields.whole("first_k_dense_replace")
    types = fields.get("mlp_layer_types") if family.dense_layers == "listed" else None
    if types is not None:
        listed = [str(each) for each in types] if isinstance(types, list | tuple) else []
        first = listed.count("dense")
        if listed != ["dense"] * first + ["sparse"] * (number - first):
            raise UserError(
                f"{fields.origin}: mlp_layer_types={types!r:.80} is not supported; expected "
                f"{number} layers (num_hidden_layers), 'dense' and then 'sparse': take another "
                "model"
            )
    if first >= number or said not in (None, first):
        raise UserError(
            f"{fields.origin}: {first} of {number} layers have a dense MLP, and "
            f"first_k_dense_replace={said!r:.60}; expected at least one layer with experts, and "
            "one number: correct it"
        )
    return first


def layers_of_type(kind: str, types: Sequence[str] | None) -> tuple[int, ...]:
    """Indices, from 0, of the layers of one type."""
    return tuple(i for i, each in enumerate(types or ()) if each == kind)
