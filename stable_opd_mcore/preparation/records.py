"""Records of the preparation: what a row offers, why one is dropped, and which files are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Candidate:
    """A row that may be kept."""

    problem: str
    answer: str | None
    solutions: tuple[str, ...]  # the shortest one is kept; empty: the data have none


@dataclass(frozen=True)
class Dropped:
    """A row that is not kept."""

    reason: str  # rows are counted by it
    detail: str = ""


@dataclass(frozen=True)
class Kept:
    """A row as it is written."""

    problem: str
    answer: str | None
    solution: str | None
    problem_tokens: int
    solution_tokens: int  # 0 without a solution


@dataclass(frozen=True)
class InputFile:
    """A parquet or JSON Lines file that is read."""

    path: Path
    name: str  # in row names and in the manifest: the path inside the source
    num_bytes: int
    sha256: str
