"""Read the JSON object in someone else's file or line: every fault is one message."""

import json
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from stable_opd_mcore.errors import DataError

MIB = 2**20
_Model = TypeVar("_Model", bound=BaseModel)


def require_size(path: Path, limit_bytes: int, remedy: str = "download it again") -> None:
    """Raise a DataError for a larger file."""
    size = path.stat().st_size
    if size > limit_bytes:
        raise DataError(
            f"{path}: {size / MIB:.1f} MiB, more than {limit_bytes / MIB:.0f} MiB: no file of this "
            f"name is so large; {remedy}"
        )


def read_json_object(
    path: Path, limit_bytes: int = 16 * MIB, remedy: str = "download it again"
) -> dict[str, Any]:
    """The object in a file; a DataError if the file is too large or holds anything else."""
    require_size(path, limit_bytes, remedy)
    return _object(path.read_bytes(), str(path), remedy)


def object_in_line(line: bytes | str, place: str) -> dict[str, Any]:
    """The object in the line at `place` (file and number); a DataError if it is anything else."""
    return _object(line, place, "every line must be one object, complete, in UTF-8")


def list_in_file(text: bytes, path: Path) -> list[dict[str, Any]]:
    """The objects of the one list in a file; a DataError if it is anything else."""
    rows = _value(text, str(path), "a file of rows is one list of objects, in UTF-8")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a JSON {type(row).__name__}; write an object a row")
    return rows


class _TwoValuesError(ValueError):
    """A key stands twice in an object; json would keep its last value."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if value != (last := found[key]):
                raise _TwoValuesError(f"{key!r} has two values, {value!r:.60} and {last!r:.60}")
    return found


def _object(text: bytes | str, place: str, remedy: str) -> dict[str, Any]:
    value = _value(text, place, remedy)
    if not isinstance(value, dict):
        raise DataError(f"{place}: a JSON {type(value).__name__}, not an object; {remedy}")
    return cast("dict[str, Any]", value)


def _value(text: bytes | str, place: str, remedy: str) -> Any:
    """Parsed by json: orjson refuses half an emoji, which a decoder may leave."""
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except _TwoValuesError as error:
        raise DataError(f"{place}: {error}; keep the right one") from None
    except (ValueError, RecursionError) as error:  # no JSON, not UTF-8, nested too deep
        raise DataError(f"{place}: not valid JSON: {error}; {remedy}") from None


def validated(model: type[_Model], record: dict[str, Any], place: str) -> _Model:
    """The record at `place` as a pydantic model; a DataError names the first wrong column."""
    try:
        return model.model_validate(record)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
    name = "".join(parts).removeprefix(".")
    if fault["type"] == "missing":
        raise DataError(f"{place}: column {name} is missing; restore the file or download it again")
    raise DataError(
        f"{place}: column {name} is {fault['input']!r:.60}: {fault['msg']}; restore the file or "
        "download it again"
    )
