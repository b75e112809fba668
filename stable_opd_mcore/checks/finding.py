"""What a check found: how severe, the two values that do not go together, what follows, the remedy.

Not here: how findings are shown (printing.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """An `error` ends a run at its start. A `warning` harms training. A `note` is handled here, or
    harmless, and differs from what one would expect.
    """

    severity: Severity
    subject: str  # of the check: "tokens", "stop tokens", "data"...
    title: str  # what was found, one sentence
    values: tuple[tuple[str, str], ...] = ()  # whose or which, and its value; two of them
    consequence: str = ""  # what it does to training
    remedy: str = ""  # the setting that mends it


def refused(subject: str, error: Exception) -> Finding:
    """An error that also ends `train`; its message names the values and the remedy."""
    return Finding("error", subject, str(error), consequence="a run with it ends at its start")
