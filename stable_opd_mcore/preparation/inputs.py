"""Finds the files of a source, checks them, and reads them in parts of flat memory.

A part of a parquet file is a row group, read in batches of few rows and only in the columns that
are needed. A part of a JSON Lines file is a range of bytes between two lines. Not here: the hub
(host/hub.py), the rules for rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.json_files import object_in_line
from stable_opd_mcore.preparation.records import InputFile, Part

_BATCH_ROWS = 64
_PART_BYTES = 8 * 2**20
_MAX_LINE_BYTES = 64 * 2**20


def find_files(folder: Path, globs: Sequence[str]) -> list[Path]:
    """The source itself if it is a file, else the files of the first glob that matches, sorted.

    Raises:
        DataError: nothing matches, or the file is of another kind.
    """
    if folder.is_file():
        if folder.suffix not in (".parquet", ".jsonl"):
            raise DataError(f"{folder}: unknown kind of file; use .parquet or .jsonl")
        return [folder]
    for glob in globs:
        found = sorted(path for path in folder.glob(glob) if path.is_file())
        if found:
            return found
    raise DataError(
        f"{folder}: no file that matches {' or '.join(globs)}; name a folder or a file that holds "
        "the rows with --source"
    )


def open_input(path: Path, name: str, columns: Sequence[str]) -> tuple[InputFile, list[Part]]:
    """Check that a file is readable and has the columns, and divide it into parts.

    Args:
        columns: their names; a dotted one ("prompt.1.content") reaches into a column.

    Raises:
        DataError: an unreadable file, or a missing column.
    """
    if path.suffix == ".parquet":
        return _open_parquet(path, name, columns)
    return _open_jsonl(path, name, columns)


def read_part(part: Part, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number, columns) of each row of a part.

    Raises:
        DataError: a file that cannot be read, or a line that is no JSON object.
    """
    if part.file.path.suffix == ".parquet":
        return _read_row_group(part, columns)
    return _read_lines(part)


def _open_parquet(path: Path, name: str, columns: Sequence[str]) -> tuple[InputFile, list[Part]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as opened:
            names = opened.schema_arrow.names
            sizes = [
                opened.metadata.row_group(group).num_rows
                for group in range(opened.metadata.num_row_groups)
            ]
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    _require_columns(path, names, columns)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    described = InputFile(path, name, path.stat().st_size, digest)
    parts: list[Part] = []
    row = 0
    for group, size in enumerate(sizes):
        parts.append(Part(described, row, size, group, group + 1))
        row += size
    return described, parts


def _read_row_group(part: Part, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    number = part.first_row
    try:
        with pyarrow.parquet.ParquetFile(part.file.path, pre_buffer=False) as opened:
            roots = {name.split(".")[0] for name in columns}
            wanted = [n for n in opened.schema_arrow.names if n in columns or n in roots]
            for batch in opened.iter_batches(
                _BATCH_ROWS, row_groups=[part.start], columns=wanted, use_threads=False
            ):
                for record in batch.to_pylist():
                    yield number, record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{part.file.path}: not a readable parquet file: {error}") from error


def _open_jsonl(path: Path, name: str, columns: Sequence[str]) -> tuple[InputFile, list[Part]]:
    """One pass over the file: its hash, and ranges of whole lines."""
    digest = hashlib.sha256()
    ranges: list[tuple[int, int, int, int]] = []
    line, start = 1, 0
    with path.open("rb") as file:
        while block := file.read(_PART_BYTES):
            rest = b"" if block.endswith(b"\n") else file.readline(_MAX_LINE_BYTES)
            if len(rest) == _MAX_LINE_BYTES:
                raise DataError(f"{path}: a line of more than 64 MiB; is this JSON Lines?")
            block += rest
            digest.update(block)
            lines = block.count(b"\n") + (not block.endswith(b"\n"))
            ranges.append((line, lines, start, start + len(block)))
            line, start = line + lines, start + len(block)
    described = InputFile(path, name, start, digest.hexdigest())
    parts = [Part(described, *numbers) for numbers in ranges]
    first = next((record for part in parts for _, record in _read_lines(part)), None)
    if first is None:
        raise DataError(f"{path}: no rows in it")
    _require_columns(path, list(first), columns)
    return described, parts


def _read_lines(part: Part) -> Iterator[tuple[int, Mapping[str, Any]]]:
    path = part.file.path
    with path.open("rb") as file:
        file.seek(part.start)
        number = part.first_row - 1
        while file.tell() < part.stop:
            line = file.readline()
            number += 1
            if not line.strip():
                continue
            yield number, object_in_line(line, f"{path}:{number}")


def _require_columns(path: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    missing = [n for n in columns if n not in names and n.split(".")[0] not in names]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(names)}. Choose the recipe of "
            "this data set, or name the columns with --problem, --answer and --solution"
        )
