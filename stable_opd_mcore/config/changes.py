"""What differs between the settings of a run directory and those it is resumed with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from stable_opd_mcore.config.load import read_mapping, unescaped
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.section import Section

# Keys and sections that may differ when a run is resumed: how long, where, how fast, how watched.
FREE = (
    "run",
    "parallel",
    "checkpoint",
    "evaluation",
    "monitoring",
    "fault",
    "memory",
    "data.eval",
    "environment.memory_gib",
    "environment.timeout_seconds",
    "environment.workers",
    "teacher.urls",
    "teacher.routes",
    "teacher.api_key_file",
    "teacher.verify",
    "rollout.save",
    "rollout.sglang",
    "train.steps",
    "train.micro_batch_tokens",
    "train.recompute",
)


def read_settings(path: Path) -> dict[str, Any]:
    """A resolved config as plain values. Raises what `read_mapping` raises."""
    return unescaped(OmegaConf.to_container(read_mapping(path)))


def changes(old: Mapping[str, Any], new: Config) -> dict[str, tuple[Any, Any]]:
    """Key -> (old value, new value) of every setting that differs and is not FREE.

    A setting that `old` lacks, because it is newer than the run, counts as its default.
    train.steps is free while the learning rate does not depend on it (optimizer.schedule=constant),
    and the guard while it only watches.
    """
    old = _with_defaults(old, new)
    differences = _differences(old, new.model_dump(mode="json", by_alias=True), "")
    free = [key for key in FREE if key != "train.steps" or new.optimizer.schedule == "constant"]
    old_guard = old.get("guard", {})
    acted = isinstance(old_guard, Mapping) and cast("Any", old_guard).get("policy") == "act"
    if not (acted or new.guard.acts):
        free.append("guard")
    return {key: values for key, values in differences.items() if not _is_in(key, free)}


def _is_in(key: str, keys: Sequence[str]) -> bool:
    """Whether a setting is one of the keys or in a section among them."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def by_dotted_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings of all sections under keys such as `student.path`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= by_dotted_key(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _with_defaults(old: Any, new: Any) -> Any:
    """The old values, with the default of each setting that they lack and a section of `new` has.

    A list of sections is left as it is if its length differs: then all of it is a change.
    """
    if isinstance(old, list) and isinstance(new, list | tuple):
        entries, sections = cast("list[Any]", old), cast("Sequence[Any]", new)
        if len(entries) == len(sections):
            return list(map(_with_defaults, entries, sections))
    if not (isinstance(old, Mapping) and isinstance(new, Section)):
        return cast("Any", old)
    values = dict(cast("Mapping[str, Any]", old))
    lacking: dict[str, Any] = {}
    for name, field in type(new).model_fields.items():
        key = field.alias or name
        if key in values:
            values[key] = _with_defaults(values[key], getattr(new, name))
        elif not field.is_required():
            lacking[name] = field.get_default(call_default_factory=True)
    defaults = new.model_copy(update=lacking)
    return values | defaults.model_dump(mode="json", by_alias=True, include=set(lacking))


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str
) -> dict[str, tuple[Any, Any]]:
    differences: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            inner = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", now)
            differences |= _differences(*inner, f"{prefix}{key}.")
        elif before != now:
            differences[prefix + key] = (before, now)
    return differences
