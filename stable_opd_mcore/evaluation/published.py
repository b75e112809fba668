"""Published results on the six benchmarks, to print next to ours. Numbers are per cent."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("published.yaml").read_text(encoding="utf-8")
)
COLUMNS: dict[str, str] = _TABLE["columns"]  # a name of BENCHMARKS -> its heading


@dataclass(frozen=True)
class PublishedRow:
    """One row of a paper's table."""

    student: str
    method: str
    source: str
    average: float
    scores: list[float] | None = None  # in the order of COLUMNS; None: only the average


PUBLISHED = [PublishedRow(**row) for row in _TABLE["rows"]]
