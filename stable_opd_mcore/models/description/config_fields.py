"""The fields of a model's config.json, read one by one with errors that name the file and the key.

What they mean is in families.py and rotary_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.json_files import read_json_object

LARGEST_COUNT, LARGEST_NUMBER = 10**8, 1e15  # beyond those of any model
READ_OUTSIDE = ("model_type", "tie_word_embeddings")  # transformers does not read text_config's


def read_fields(source: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The fields of a config.json, unchecked but for text_config, and its name for errors.

    Raises:
        UserError: no such file, too large a one, no JSON object in it, or none in text_config.
    """
    if isinstance(source, Mapping):
        return "architecture", _with_text_object("architecture", source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; give a model directory, with config.json and safetensors"
        )
    if path.suffix != ".json":
        raise UserError(f"{path}: a file; give a directory with config.json and safetensors")
    return str(path), _with_text_object(str(path), read_json_object(path))


def _with_text_object(origin: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    text = settings.get("text_config")
    if text is None:
        return {key: value for key, value in settings.items() if key != "text_config"}
    if not isinstance(text, Mapping):
        raise UserError(f"{origin}: text_config={text!r:.60} should be an object; correct it")
    if "text_config" in text:
        raise UserError(f"{origin}: text_config has a text_config of its own; remove that")
    return settings


def decoder_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json with those of its text_config, where a model has other parts,
    in one level.
    """
    outer = dict(settings)
    text = outer.pop("text_config", None) or {}
    own = {key: value for key, value in text.items() if key not in READ_OUTSIDE}
    return outer | {k: value for k, value in own.items() if value is not None or k not in outer}


def is_mxfp4(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the files hold experts in MXFP4 (models/files/mxfp4.py)."""
    method = settings.get("quantization_config")
    return isinstance(method, Mapping) and method.get("quant_method") == "mxfp4"


def with_layers(settings: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The settings of a model's first layers."""
    if "text_config" in settings:
        return {**settings, "text_config": with_layers(settings["text_config"], number)}
    types = {"layer_types": types[:number]} if (types := settings.get("layer_types")) else {}
    return {**settings, **types, "num_hidden_layers": number}


@dataclass(frozen=True)
class Fields:
    """The fields of one decoder."""

    origin: str  # config.json's name for errors
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; UserError for anything else, and without default for none."""
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            needed_by = f"which a {self.values['model_type']} config needs"
            raise UserError(f"{self.origin}: no {key}, {needed_by}; add it")
        if type(value) is not int or not 1 <= value <= LARGEST_COUNT:
            shown = "null" if value is None else f"{value!r:.60}"
            raise UserError(
                f"{self.origin}: {key}={shown} should be a positive whole number, at most "
                f"{LARGEST_COUNT:,}"
            )
        return value

    def whole(self, key: str) -> int:
        """Zero or a positive whole number; UserError for anything else."""
        return 0 if self.values.get(key) == 0 else self.count(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false, which null is, too; UserError for anything else."""
        value = self.values.get(key, default)
        if not isinstance(value, bool | None):
            raise UserError(f"{self.origin}: {key}={value!r:.60} should be true or false")
        return bool(value)

    def number(self, key: str, default: float) -> float:
        """A positive number; UserError for anything else, and for one beyond any model's."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST_NUMBER:
            shown = "null" if value is None else f"{value!r:.60}"
            raise UserError(
                f"{self.origin}: {key}={shown} should be a positive number, at most "
                f"{LARGEST_NUMBER:g}"
            )
        return float(value)
