"""Every metric that a run may write: its key, its meaning and its unit, as metrics.yaml lists them.

The sinks refuse a key that is not listed, and the report shows the meanings.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from stable_opd_mcore.config.rollouts import MAX_STALENESS

TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")
)


class Name(NamedTuple):
    meaning: str
    unit: str  # "" where the number has none


def _with_parts(key: str, meaning: str, unit: str, parts: str = "") -> dict[str, Name]:
    """A metric and its values over parts of the responses, for what `parts` names: ends, quarters
    or turns."""
    names = {key: Name(meaning, unit)}
    for kind in parts.split():
        for part, where in TABLE["parts"][kind].items():
            names[f"{key}_{part}"] = Name(f"{meaning}, {where}", unit)
    return names


def _all_names() -> dict[str, Name]:
    names: dict[str, Name] = {}
    for key, entry in TABLE["metrics"].items():
        if isinstance(entry, str):
            for name, (meaning, *rest) in TABLE["responses"].items():
                of_these = meaning.format(whose=entry)
                names |= _with_parts(key.replace("*", name), of_these, *rest)
        elif key.endswith("*"):
            meaning, unit = entry
            for age in range(MAX_STALENESS + 1):
                names[key.replace("*", str(age))] = Name(meaning.format(age=age), unit)
        else:
            names |= _with_parts(key, *entry)
    return names


NAMES = _all_names()


def name_of(key: str) -> Name | None:
    """Meaning and unit of a metric; None for an unknown one."""
    area, _, rest = key.partition("/")
    if area in ("source", "teacher") and "/" in rest:
        entry = TABLE["sources"].get(rest.rpartition("/")[2])
        return entry and Name(*entry)
    if rest.startswith("own_"):
        return Name(f"mean of {rest.removeprefix('own_')}, which the environment returned", "")
    return NAMES.get(key)


def require_known(keys: Iterable[str]) -> None:
    """Raise a ValueError that names the keys that are not listed."""
    unknown = sorted(key for key in keys if name_of(key) is None)
    if unknown:
        raise ValueError(
            f"unknown metrics {', '.join(unknown)}: describe them in monitoring/metrics.yaml"
        )
