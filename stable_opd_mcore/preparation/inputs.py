"""Finds the files of a source and checks them. No file is unpacked or run.

Not here: reading their rows (data/sources.py), the hub (host/hub.py), the rules for rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stable_opd_mcore.data.sources import read_file
from stable_opd_mcore.errors import DataError


@dataclass(frozen=True)
class InputFile:
    """A parquet or JSON Lines file that is read."""

    path: Path
    name: str  # in row names and in the manifest: the path inside the source
    num_bytes: int
    sha256: str


def find_files(source: Path, globs: Sequence[str]) -> list[Path]:
    """The source itself if it is a file, else the files of the first glob that matches, sorted.

    Raises:
        DataError: nothing matches.
    """
    if not source.exists():
        raise DataError(f"{source}: no such file or folder; check --source")
    if source.is_file():
        return [source]
    for glob in globs:
        found = sorted(path for path in source.glob(glob) if path.is_file())
        if found:
            return found
    raise DataError(
        f"{source}: no file that matches {' or '.join(globs)}; name a folder or a file that holds "
        "the rows with --source"
    )


def open_input(path: Path, name: str, columns: Sequence[str]) -> InputFile:
    """Check that a file is readable and has the columns.

    Args:
        columns: their names; a dotted one ("prompt.1.content") reaches into a column.

    Raises:
        DataError: an unreadable file, one of another kind or without rows, or a missing column.
    """
    _, names = next(read_file(path), (0, None))
    if names is None:
        raise DataError(f"{path}: no rows in it")
    missing = [n for n in columns if n not in names and n.split(".")[0] not in names]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(names)}. Choose the recipe of "
            "this data set, or name the columns with --problem, --answer and --solution"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return InputFile(path, name, path.stat().st_size, digest)
