"""The settings of an adapter that PEFT has saved. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.json_files import read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings with which PEFT's merge is another, or none -> the values that are accepted
MERGED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_qalora": (False,),
    "layer_replication": (None,),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "init_lora_weights": (
        True,
        False,
        None,
        "gaussian",
        "orthogonal",
        "eva",
    ),  # others change the base
}
# What PEFT cannot merge either: methods that add to what a model reads, or that act by it
_METHODS_BY_INPUT = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT"),
    *("CPT", "CARTRIDGE", "XLORA", "POLY"),
)
_SETTINGS_BY_INPUT = ("alora_invocation_tokens", "arrow_config")


def read_settings(directory: Path) -> dict[str, Any]:
    """The fields of adapter_config.json.

    Raises:
        UserError: no such file, or a variant of LoRA whose merge is not defined.
    """
    file = directory / CONFIG
    if not file.is_file():
        inside = sorted(str(each.parent) for each in directory.glob(f"*/{CONFIG}"))
        more = f", such as {' or '.join(inside[:3])}" if inside else ""
        raise UserError(f"{file}: no such file; give a directory that PEFT has saved{more}")
    fields = read_json_object(file)
    if not fields.keys() & {"peft_type", "r"}:
        raise UserError(
            f"{file}: neither peft_type nor r, so another program has written it (MLX does); write "
            "the adapter in PEFT's form"
        )
    refuse_values(file, fields, MERGED_SETTINGS)
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    if type(rank) is not int or type(alpha) not in (int, float) or min(rank, alpha) <= 0:
        raise UserError(
            f"{file}: r={rank!r} and lora_alpha={alpha!r} should be positive numbers; copy or "
            "download it again"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = fields.get(key) or {}
        if not isinstance(pattern, dict) or any(
            type(value) not in (int, float) or value <= 0 for value in pattern.values()
        ):
            raise UserError(
                f"{file}: {key}={pattern!r:.60} should map names to positive numbers; copy or "
                "download it again"
            )
    return fields


def refuse_values(
    file: Path, fields: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise a UserError for a setting with a value that is not accepted."""
    for key, values in accepted.items():
        if key not in fields or fields[key] in values:
            continue
        remedy = "merge the adapter with PEFT (merge_and_unload), and give the merged model"
        if fields[key] in _METHODS_BY_INPUT or key in _SETTINGS_BY_INPUT:
            remedy = "no weights have its effect, so it cannot be merged; train an adapter of LoRA"
        raise UserError(
            f"{file}: {key}={fields[key]!r} is not supported; expected {values[0]!r}: {remedy}"
        )
