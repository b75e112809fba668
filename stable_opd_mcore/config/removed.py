"""Settings of earlier releases that are gone: what holds without them, and what to do instead.

A file that asks for what still holds is read as before, so that runs of earlier releases resume.
Any other value is refused by name. A row stays for one release.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from stable_opd_mcore.errors import ConfigError


@dataclass(frozen=True)
class Removed:
    still_hold: tuple[Any, ...]  # values that are accepted: what now always holds, old defaults
    instead: str  # one sentence: what to do with any other value


_ABLATION = "drop it: the last commit with this ablation is tagged before-lighter"
# By dotted key; of a list of sections, without an index.
REMOVED: dict[str, Removed] = {
    "evaluation.teacher_accuracy": Removed(
        (None,), "drop it: evaluate the teacher by `stable-opd evaluate` and compare"
    ),
    "objective.advantage.constant": Removed((None,), _ABLATION),
    "objective.position_half_life": Removed((None,), _ABLATION),
    "optimizer.distributed": Removed((True,), "drop it: the optimizer's state is always sharded"),
    "rollout.sglang.dtype": Removed((None,), "drop it: servers compute in train.precision"),
}


def without_removed(values: Any, origin: str, overrides: Sequence[str] = ()) -> Any:
    """The plain values of a config without settings that are gone.

    Args:
        origin: names the file in errors, where no override set the key.

    Raises:
        ConfigError: names each key that is gone and asks for what no longer exists.
    """
    values = deepcopy(values)
    refused: list[str] = []
    for key, removed in REMOVED.items():
        *path, name = key.split(".")
        for section in _sections(values, path):
            if name not in section:
                continue
            value = section.pop(name)
            if value not in removed.still_hold:
                given = [item for item in overrides if item.partition("=")[0] == key]
                where = f"override {given[-1]!r:.200}" if given else origin
                refused.append(f"{where}: {key}={value!r:.200} is gone; {removed.instead}")
    if refused:
        raise ConfigError("\n".join(refused))
    return values


def _sections(values: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All sections at a path of keys; a list on the way stands for each of its entries."""
    if isinstance(values, list):
        for entry in cast("list[Any]", values):
            yield from _sections(entry, path)
    elif isinstance(values, Mapping):
        section = cast("dict[str, Any]", values)
        if not path:
            yield section
        elif path[0] in section:
            yield from _sections(section[path[0]], path[1:])
