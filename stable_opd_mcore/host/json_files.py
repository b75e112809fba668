"""Read the JSON object in a file or a line of others: every fault one message.

Not here: which files hold rows (data/sources.py), the run's own files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from stable_opd_mcore.errors import DataError

MIB = 2**20


def require_size(path: Path, limit_bytes: int) -> None:
    """
    Raises:
        DataError: the file is larger.
    """
    size = path.stat().st_size
    if size > limit_bytes:
        raise DataError(
            f"{path}: {size / MIB:.1f} MiB, more than {limit_bytes / MIB:.0f} MiB: no file of this "
            "name is so large; download it again"
        )


def read_json_object(path: Path, limit_bytes: int = 16 * MIB) -> dict[str, Any]:
    """
    Raises:
        DataError: too large, not readable, no JSON text, or no object in it.
    """
    require_size(path, limit_bytes)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # no JSON, not UTF-8, nested too deep
        raise DataError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: a JSON {type(values).__name__}, not an object")
    return cast("dict[str, Any]", values)


def object_in_line(line: bytes, place: str) -> dict[str, Any]:
    """The object in a line of JSON Lines; `place` is its file and number.

    Raises:
        DataError: no JSON text, or no object in it.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: not a JSON value ({error}); every line must be one object, complete, in "
            "UTF-8"
        ) from None
    if not isinstance(record, dict):
        raise DataError(f"{place}: a JSON {type(record).__name__}, not an object with columns")
    return cast("dict[str, Any]", record)
