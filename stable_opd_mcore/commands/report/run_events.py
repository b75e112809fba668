"""The events of a run as the report shows them: a step, a title and a line for each detail.

Any object with "event" and "after_step" in metrics.jsonl is one: changed settings, what the guard
did. Its other keys are its details. Text from the file is untrusted; it becomes printable here and
the page shows it as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stable_opd_mcore.host.printable_text import printable

MAX_LINES = 12  # lines of one event
MAX_CHARACTERS = 200  # characters of one detail
MAX_DEPTH = 3  # mappings and lists inside each other
ARROW = "\N{RIGHTWARDS ARROW}"
SYMBOLS = {  # of what a line in a figure marks
    "symptom": "\N{WHITE DOWN-POINTING TRIANGLE}",
    "damage": "\N{MULTIPLICATION X}",
    "measure": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "other": "\N{BULLET}",
}
_KINDS = {  # by the guard's action
    "warned": "symptom",
    "damaged": "damage",
    **dict.fromkeys(("raised", "rolled_back", "stopped"), "measure"),
}


def marks(events: Sequence[Mapping[str, Any]], run: int) -> list[dict[str, Any]]:
    """One record per event of the `run`-th run: run, step, title, lines, kind (of SYMBOLS)."""
    return [
        {
            "run": run,
            "step": event["after_step"],
            "title": _title(event),
            "lines": _lines(event),
            "kind": _KINDS.get(str(event.get("action")), "other"),
        }
        for event in events
    ]


def _title(event: Mapping[str, Any]) -> str:
    name = printable(event["event"].replace("_", " "), MAX_CHARACTERS)
    action = event.get("action")
    return f"{name}: {printable(action, MAX_CHARACTERS)}" if isinstance(action, str) else name


def _lines(event: Mapping[str, Any]) -> list[str]:
    """A line per detail, and per entry of a mapping, such as changed settings or evidence."""
    lines: list[str] = []
    for key, value in event.items():
        if key in ("event", "after_step", "action"):
            continue
        entries = value if isinstance(value, Mapping) else {key: value}
        separator = f" {ARROW} " if key == "changes" else "; "  # the old and the new value
        lines += [f"{name}: {_text(entry, separator)}" for name, entry in entries.items()]
    shown = [printable(line, MAX_CHARACTERS) for line in lines[:MAX_LINES]]
    return [*shown, f"{len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else shown


def _text(value: Any, separator: str = "; ", depth: int = 0) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (Mapping, list)) and depth == MAX_DEPTH:
        return f"{len(value)} values"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item, depth=depth + 1)}" for key, item in value.items())
    if isinstance(value, list):
        return separator.join(_text(item, depth=depth + 1) for item in value[:MAX_LINES])
    return "none" if value is None else str(value)
