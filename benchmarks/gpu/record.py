"""What a part of the suite writes down: figures, checks, and what it could not measure.

A line of JSON is written for each as soon as it is known, so that a part that crashes or hangs
leaves what it measured before. Not here: the process and its time limit (suite.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

SKIPPED = 77  # exit code of a part that cannot run on this machine, as in automake

Kind = Literal["figure", "check", "skipped", "notice"]


@dataclass(frozen=True)
class Entry:
    """One line of a part's record."""

    kind: Kind
    name: str
    value: float | str | None = None  # None: nothing was measured
    unit: str = ""  # the value's and the limit's
    limit: float | None = None  # the largest value with which a check passes
    note: str = ""  # why it was skipped, or how it was measured

    @property
    def passes(self) -> bool:
        """False for a check whose value is above its limit or no finite number."""
        if self.kind != "check":
            return True
        assert isinstance(self.value, float)
        assert self.limit is not None
        return math.isfinite(self.value) and self.value <= self.limit


class Skipped(Exception):
    """The part cannot run on this machine; the message says why."""


class Record:
    """A part's record, written to a file line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")

    def figure(self, name: str, value: float | str, unit: str = "", note: str = "") -> None:
        """A measured figure that no limit applies to."""
        self._write(Entry("figure", name, value, unit, note=note))

    def check(self, name: str, value: float, limit: float, unit: str = "", note: str = "") -> None:
        """An error that must be at most `limit`. A part with a larger one has failed."""
        self._write(Entry("check", name, float(value), unit, float(limit), note))

    def skip(self, name: str, reason: str) -> None:
        """One measurement that this machine does not allow."""
        self._write(Entry("skipped", name, note=reason))

    def notice(self, name: str, text: str) -> None:
        """What the command line says below the part's status."""
        self._write(Entry("notice", name, note=text))

    def _write(self, entry: Entry) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


def read_entries(path: Path) -> list[Entry]:
    """The whole lines of a record; a killed part may leave a half one at the end."""
    if not path.is_file():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return [Entry(**json.loads(line)) for line in whole.splitlines()]
