"""The files of a model directory that hold no weights: config.json and those of the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stable_opd_mcore.data.tokenizer_backend import tokenizer_files, write_files
from stable_opd_mcore.host.hub import IMAGE_FILES
from stable_opd_mcore.models.description.architecture import Architecture

TRAINED = "trained.json"  # an exported model's file: the run and step it is from
_GENERATION = "generation_config.json"


def write_config(architecture: Architecture, dtype: torch.dtype, directory: Path) -> None:
    """Write config.json for weights of this type, with the model class, which servers need and an
    inline architecture may lack, and without code of the model's own, which is not copied."""
    name = str(dtype).removeprefix("torch.")

    def with_type(settings: Mapping[str, Any]) -> dict[str, Any]:
        keys = [key for key in ("dtype", "torch_dtype") if key in settings] or ["dtype"]
        return {**settings, **dict.fromkeys(keys, name)}

    family = architecture.family
    settings = with_type({k: v for k, v in architecture.source.items() if k != "auto_map"})
    settings["architectures"] = settings.get("architectures") or [
        family.full_class or family.sglang_class
    ]
    if family.text_type:
        settings["text_config"] = with_type(settings["text_config"])
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer and generation settings of one model directory to another."""
    write_files(tokenizer_files(str(source)), directory)
    copy_generation_settings(source, directory)


def copy_generation_settings(source: Path, directory: Path) -> None:
    """Copy only the generation settings."""
    _copy(source, directory, [_GENERATION])


def copy_image_settings(source: Path, directory: Path) -> None:
    """Copy what says how images and videos become a model's inputs."""
    _copy(source, directory, IMAGE_FILES)


def _copy(source: Path, directory: Path, files: Sequence[str]) -> None:
    for file in files:
        if (source / file).is_file():
            shutil.copy(source / file, directory / file)
