"""Rows that the datasets library reads: from a folder of files, a saved data set or a hub id."""

# Not strict: datasets has no types.
# pyright: basic

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, cast

from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.hub import is_hub_id

STATE = "state.json"  # in a saved data set
_UNFINISHED = r"\.(incomplete|part|partial|tmp|crdownload|download|aria2)"
_DATA_FILE = re.compile(
    r".*\.(json|jsonl|ndjson|parquet|csv|tsv|arrow|txt)(\.(gz|bz2|xz|zst|lz4|zip))?"
    rf"(?P<unfinished>{_UNFINISHED})?",
    re.IGNORECASE,
)
_OTHER_JSON = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_NARROW = re.compile(r"\b(?:half)?float\b")  # Arrow's names of float16 and float32
_JSON = re.compile(r"\bextension<arrow\.json>")
_SHARD = re.compile(r"(.*[-_.])(\d+)-of-(\d+)(?!\d).*")


def unread_files(folder: Path, read: Iterable[str]) -> list[str]:
    """The data files of a folder that are not among those `read`, by their names in it."""
    known = set(map(os.path.realpath, read))
    unread: list[str] = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        is_hidden = any(part.startswith((".", "__")) for part in name.parts)
        is_data = _DATA_FILE.fullmatch(file.name) and file.name not in (*_OTHER_JSON, STATE)
        if is_data and not is_hidden and file.is_file() and os.path.realpath(file) not in known:
            unread.append(str(name))
    return unread


def _refuse_unread_files(folder: Path, read: Iterable[str]) -> None:
    """Refuse a folder with data files that are not among those `read`, which are of all splits.

    `datasets` reads only the most frequent kind of file. Where README.md or names give some files
    to a split, it passes over the others.
    """
    files = list(read)
    matches = ((file, _DATA_FILE.fullmatch(Path(file).name)) for file in files)
    if unfinished := next((file for file, found in matches if found and found["unfinished"]), None):
        raise DataError(
            f"{unfinished}: an unfinished download, by its name; download it again, rename it if "
            "it is whole, or move it away"
        )
    if unread := unread_files(folder, files):
        more = f" and {len(unread) - 3} more" if unread[3:] else ""
        raise DataError(
            f"{folder}: {', '.join(unread[:3])}{more} would not be read with its other files: "
            "datasets reads one kind of file, and only those that README.md or their names give to "
            "a split, where there are some; set data.*.path to one file, convert or rename these, "
            "or move them away"
        )


def refuse_missing_shards(folder: Path, read: Iterable[str]) -> None:
    """Refuse a series of files `NAME-00000-of-00003` that is not whole."""
    found: dict[tuple[str, int], set[int]] = {}
    for shard in filter(None, map(_SHARD.fullmatch, read)):
        found.setdefault((shard[1], int(shard[3])), set()).add(int(shard[2]))
    for (name, count), numbers in found.items():
        first = int(count in numbers)  # some number from 1
        missing = [n for n in range(first, first + count) if n not in numbers]
        if missing:
            raise DataError(
                f"{folder}: of the {count} files {Path(name).name}*-of-{count:05}, number "
                f"{', '.join(map(str, missing[:9]))} is missing; download the rest, or rename the "
                "files if these are all"
            )


def _files_of_splits(path: str) -> dict[str, list[str]]:
    """The files that `datasets` finds in a folder, by split. All configurations count."""
    import datasets

    found: dict[str, list[str]] = {}
    for name in datasets.get_dataset_config_names(path):
        with suppress(FileNotFoundError):  # a configuration whose files were not downloaded
            config = datasets.load_dataset_builder(path, name).config
            for split, files in (config.data_files or {}).items():
                found.setdefault(str(split), []).extend(files)
    return found


def read_dataset(source: SourceConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, columns) of each row of the source's split; numbers begin at 0.

    Raises:
        DataError: nothing there, data files that would not be read, no such split, or a hub id
            whose commit is not available.
    """
    path = Path(source.path)
    if not path.exists() and not is_hub_id(source.path):
        raise DataError(
            f"{source.path}: no such file or directory, nor a hub id (owner/name); "
            "check data.*.path"
        )
    import datasets  # takes seconds, so only sources that need it import it
    from datasets.exceptions import DatasetsError

    try:
        if any((path / name).is_file() for name in (STATE, "dataset_dict.json")):
            _refuse_unread_files(path, map(str, path.rglob("*.arrow")))
            loaded = datasets.load_from_disk(source.path)
            dataset = loaded[source.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            if path.is_dir():
                files = _files_of_splits(source.path)
                _refuse_unread_files(path, chain(*files.values()))
                of_split = (files[each] for each in files if each in source.split)
                refuse_missing_shards(path, chain(*of_split))
            name, commit = (source.options.get(key) for key in ("configuration", "revision"))
            builder = datasets.load_dataset_builder(source.path, name, revision=commit)
            if commit is not None and builder.hash != commit:  # as datasets does without a network
                raise DataError(
                    f"{source.path}: commit {commit} cannot be downloaded, and the cache has "
                    f"{builder.hash}; run it once where there is a network, or "
                    "name the other commit as revision in data.*.options"
                )
            builder.download_and_prepare()
            dataset = builder.as_dataset(source.split)
    except DataError:
        raise
    except KeyError as error:
        raise DataError(f"{source.path}: no split {source.split!r}; set data.*.split") from error
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"{source.path}: datasets cannot load split {source.split!r}: "
            f"{error.__cause__ or error}. Without internet, download it elsewhere and name "
            "its directory or file instead"
        ) from error
    table = cast("datasets.Dataset", dataset)
    records = cast("Iterable[dict[str, Any]]", table)
    yield from enumerate(with_shortest_floats(records, table.features.arrow_schema))


def with_shortest_floats(
    records: Iterable[dict[str, Any]], schema: Any
) -> Iterator[dict[str, Any]]:
    """Rows of an Arrow table with 0.1 for a float32 of 0.1, which Arrow gives as
    0.10000000149011612; `schema` has the types of the columns."""
    return _changed(records, schema, _NARROW, _shortest)


def with_json_values(records: Iterable[dict[str, Any]], schema: Any) -> Iterator[dict[str, Any]]:
    """Rows of an Arrow table with what a value of its type JSON says, which Arrow gives as text.

    `datasets` writes lists and objects of mixed types so, and reads them as this does.
    """
    return _changed(records, schema, _JSON, lambda value, _: json.loads(value))


def _changed(
    records: Iterable[dict[str, Any]],
    schema: Any,
    named: re.Pattern[str],
    change: Callable[[Any, Any], Any],
) -> Iterator[dict[str, Any]]:
    """The rows with `change(value, type)` for each value whose type has such a name."""
    kinds = {field.name: field.type for field in schema if named.search(str(field.type))}
    for record in records:
        own = {name: _inside(record[name], kind, named, change) for name, kind in kinds.items()}
        yield {**record, **own} if own else record


def _inside(
    value: Any, kind: Any, named: re.Pattern[str], change: Callable[[Any, Any], Any]
) -> Any:
    from pyarrow import types

    if value is None or not named.search(str(kind)):
        return value
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_inside(each, kind.value_type, named, change) for each in value]
    if types.is_struct(kind):
        items = value.items()
        return {name: _inside(each, kind.field(name).type, named, change) for name, each in items}
    return change(value, kind)


def _shortest(value: Any, kind: Any) -> Any:
    from numpy import float16, float32
    from pyarrow import types

    if types.is_float16(kind) or types.is_float32(kind):
        return float(str(float16(value) if types.is_float16(kind) else float32(value)))
    return value
