"""What a check found: how severe, the two values that do not go together, what follows, the remedy.

    yield finding("dropped-rows", dropped=1, name="data.train", rows=9, window=128)

findings.yaml holds the texts. Not here: how findings are shown (printing.py).
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """An `error` ends `check`, and a run at its start unless `may_pass`. A `warning` harms
    training. A `note` is handled here, or harmless, and differs from what one would expect.
    """

    severity: Severity
    subject: str  # "tokens", "stop tokens", "data"...
    title: str  # what was found, one sentence
    values: tuple[tuple[str, str], ...] = ()  # whose or which, and its value; two of them
    consequence: str = ""  # what it does to training
    remedy: str = ""  # the setting that fixes it
    may_pass: bool = False  # an error of one row, or of this moment: a run starts all the same


def finding(name: str, /, **fields: Any) -> Finding:
    """The finding `name` of findings.yaml, its braces filled with `fields`."""
    text = _texts()[name]
    return Finding(
        text.get("severity", "warning"),
        text["subject"],
        text["title"].format(**fields),
        tuple((k.format(**fields), v.format(**fields)) for k, v in text["values"].items()),
        text["effect"].format(**fields),
        text["remedy"].format(**fields),
        text.get("may_pass", False),
    )


def refused(subject: str, error: Exception) -> Finding:
    """An error that also ends `train`; its message names the values and the remedy."""
    return Finding("error", subject, str(error), consequence="a run with it ends at its start")


@cache
def _texts() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "findings.yaml").read_text(encoding="utf-8"))
