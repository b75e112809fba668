"""Finds the files of a source, checks them, and loads them as `datasets`, in flat memory.

Types come from the files' own columns: what `datasets` stores beside them (images, audio, paths)
is not read. No file is unpacked or run. Not here: the hub (host/hub.py), the rules for rows.
"""

# Not strict: pyarrow and datasets have no types.
# pyright: basic

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.json_files import object_in_line
from stable_opd_mcore.preparation.records import InputFile

BATCH_ROWS = 64
_MAX_LINE_BYTES = 64 * 2**20
_LINES = datasets.Features({"number": datasets.Value("int64"), "line": datasets.Value("binary")})


def find_files(source: Path, globs: Sequence[str]) -> list[Path]:
    """The source itself if it is a file, else the files of the first glob that matches, sorted.

    Raises:
        DataError: nothing matches, or the file is of another kind.
    """
    if not source.exists():
        raise DataError(f"{source}: no such file or folder; check --source")
    if source.is_file():
        if source.suffix not in (".parquet", ".jsonl"):
            raise DataError(f"{source}: unknown kind of file; use .parquet or .jsonl")
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
        DataError: an unreadable file, a file without rows, or a missing column.
    """
    if path.suffix == ".parquet":
        names = _parquet_schema(path).names
    else:
        first = next(lines_of(path), None)
        if first is None:
            raise DataError(f"{path}: no rows in it")
        names = list(object_in_line(first["line"], f"{path}:{first['number']}"))
    missing = [n for n in columns if n not in names and n.split(".")[0] not in names]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(names)}. Choose the recipe of "
            "this data set, or name the columns with --problem, --answer and --solution"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return InputFile(path, name, path.stat().st_size, digest)


def load_file(file: InputFile, columns: Sequence[str], cache: Path) -> datasets.Dataset:
    """The rows of a parquet file with these columns, or the lines of a JSON Lines file.

    Args:
        cache: a directory for the rows, which stay on disk.

    Raises:
        DataError: a file that cannot be read to its end.
    """
    try:
        if file.path.suffix != ".parquet":
            return datasets.Dataset.from_generator(  # pyright: ignore[reportReturnType]
                lines_of, features=_LINES, cache_dir=str(cache), gen_kwargs={"path": file.path}
            )
        roots = {*columns, *(name.split(".")[0] for name in columns)}
        schema = _parquet_schema(file.path)
        wanted = pyarrow.schema([field for field in schema if field.name in roots])
        return datasets.Dataset.from_parquet(  # pyright: ignore[reportReturnType]
            str(file.path),
            features=datasets.Features.from_arrow_schema(wanted),
            columns=wanted.names,
            cache_dir=str(cache),
            batch_size=BATCH_ROWS,
        )
    except DatasetsError as error:
        cause = error.__cause__ or error
        of_disk = (
            isinstance(cause, OSError) and cause.errno is not None
        )  # pyarrow's faults have none
        if of_disk or isinstance(cause, DataError):
            raise cause from error
        raise DataError(f"{file.path}: not a readable parquet file: {cause}") from error


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Number, from 1, and bytes of each line that is not blank.

    Raises:
        DataError: a line of more than 64 MiB.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES:
                raise DataError(f"{path}:{number}: more than 64 MiB in a line; is it JSON Lines?")
            if line.strip():
                yield {"number": number, "line": line}


def _parquet_schema(path: Path) -> pyarrow.Schema:
    try:
        return pyarrow.parquet.read_schema(path).remove_metadata()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
