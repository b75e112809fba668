"""The published config.json of the models that the shipped configs name (known_models.yaml).

`plan` and `rehearse` need a model's sizes and no weights, so they also work where the models are
not downloaded. An existing directory takes precedence over this table. For a hub id that
is not in it, only config.json is downloaded, or read from the hub's cache.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from stable_opd_mcore.config.schema import ModelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.hub import download, is_hub_id


def model_source(model: ModelConfig, name: str) -> tuple[str | dict[str, Any], str | None]:
    """What `read_architecture` reads for section `name`, and a note if it is from this table."""
    if model.architecture is not None:
        return model.architecture, None
    assert model.path is not None, "the schema asks for one of the two"
    if Path(model.path).exists():
        return model.path, None
    for suffix, fields in _published().items():
        if Path(model.path).as_posix().endswith(f"/{suffix}") or model.path == suffix:
            return fields, f"{name}.path={model.path} is absent: sizes as published for this model"
    if is_hub_id(model.path) and model.revision is not None:
        folder, _ = download(model.path, "model", ("config.json",), model.revision)
        return str(folder), None
    raise UserError(
        f"{name}.path={model.path}: no such directory; a plan needs only its config.json (set "
        f"{name}.path to a directory that holds it, or to a hub id with {name}.revision)"
    )


@cache
def _published() -> dict[str, dict[str, Any]]:
    """config.json by the end of the model's path."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {k: fields for k, fields in yaml.safe_load(text).items() if not k.startswith(".")}
