"""The events of a run as the report shows them: a step, a title and a line for each detail.

Any object with "event" and "after_step" in metrics.jsonl is one: changed settings, what the guard
did. Its other keys are its details. Text from the file is untrusted; it becomes printable here and
the page shows it as text. Not here: reading the file (sinks.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stable_opd_mcore.host.printable_text import beginning, printable

MAX_LINES = 12  # details of one event
MAX_CHARACTERS = 200  # of one detail
MAX_LISTED = 4  # values of a mapping that stand in one line
MAX_DEPTH = 3  # of mappings inside details
ARROW = "\N{RIGHTWARDS ARROW}"


def marks(events: Sequence[Mapping[str, Any]], run: int) -> list[dict[str, Any]]:
    """One record per event of the `run`-th run of a section: run, step, title, lines.

    The title is the event's name with its "action", if it has one.
    """
    return [
        {"run": run, "step": event["after_step"], "title": _title(event), "lines": _lines(event)}
        for event in events
    ]


def _title(event: Mapping[str, Any]) -> str:
    name = _short(str(event["event"]).replace("_", " "))
    action = event.get("action")
    return f"{name}: {_short(action)}" if isinstance(action, str) else name


def _lines(event: Mapping[str, Any]) -> list[str]:
    details = {k: v for k, v in event.items() if k not in ("event", "after_step", "action")}
    lines = _details(details, "")
    left_out = len(lines) - MAX_LINES
    if left_out > 0:
        lines = [*lines[:MAX_LINES], f"{left_out} more"]
    return lines


def _details(details: Mapping[str, Any], prefix: str) -> list[str]:
    lines: list[str] = []
    for key, value in details.items():
        if key == "changes" and isinstance(value, Mapping):
            lines += [f"{_short(name)}: {_change(pair)}" for name, pair in value.items()]
        elif isinstance(value, Mapping) and prefix and _is_flat(value):
            lines.append(f"{_short(prefix + key)}: {_listed(value)}")
        elif isinstance(value, Mapping) and value and prefix.count(".") < MAX_DEPTH:
            lines += _details(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)) and any(isinstance(one, Mapping) for one in value):
            lines += [f"{_short(prefix + key)}: {_listed(one)}" for one in value[:MAX_LINES]]
        else:
            lines.append(f"{_short(prefix + key)}: {_value(value)}")
    return lines


def _is_flat(values: Mapping[str, Any]) -> bool:
    """Whether the mapping holds a few single values, such as a symptom's mean and bound."""
    single = not any(isinstance(value, (Mapping, list, tuple)) for value in values.values())
    return 0 < len(values) <= MAX_LISTED and single


def _listed(values: Any) -> str:
    """One piece of evidence of several: its values by name."""
    if not isinstance(values, Mapping):
        return _value(values)
    return _short(", ".join(f"{key} {_value(value)}" for key, value in values.items()))


def _change(pair: Any) -> str:
    """The old and the new value of a setting."""
    if isinstance(pair, (list, tuple)) and len(pair) == 2:
        return f"{_value(pair[0])} {ARROW} {_value(pair[1])}"
    return _value(pair)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return _short("[" + ", ".join(str(item) for item in value[:MAX_LINES]) + "]")
    if isinstance(value, Mapping):
        return f"{len(value)} values"
    return _short("none" if value is None else str(value))


def _short(text: str) -> str:
    return printable(beginning(text, MAX_CHARACTERS))
