"""Makes training sets from a data set: filter its files, split the rows, write them all at once.

Outputs are renamed into place together, the manifest last: a kill at any moment leaves either no
manifest or a complete set. Memory holds hashes and lengths of rows, never all texts. rules.py
decides which rows are kept.
"""

# Not strict: datasets has no types.
# pyright: basic

import hashlib
import json
import os
import platform
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow

from stable_opd_mcore.commands.prepare.openr1 import Dropped
from stable_opd_mcore.commands.prepare.options import DROPPED, Preparation
from stable_opd_mcore.commands.prepare.rules import CONTAMINATED, Kept
from stable_opd_mcore.data.decontamination import problem_key
from stable_opd_mcore.data.sources import read_file
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import naming_disk_errors

_TEXTS = ("source", "reason", "detail", "key", "problem", "answer", "solution")
_NUMBERS = ("problem_tokens", "solution_tokens")
# A filtered row; reason "" is a kept one.
_SCHEMA = pyarrow.schema(
    [(name, pyarrow.string()) for name in _TEXTS] + [(name, pyarrow.int32()) for name in _NUMBERS]
)
_BATCH_ROWS = 32
_DETAIL_CHARACTERS = 300
_PACKAGES = ("stable-opd-mcore", "tokenizers", "pyarrow", "datasets")


def prepare_data(wanted: Preparation, print_line: Callable[[str], None]) -> None:
    """Write the outputs of a recipe, the benchmarks, the dropped rows and the manifest.

    Raises:
        UserError: an unreadable file, too few rows, a full disk.
    """
    new = wanted.directory / f".prepare-{wanted.name}"
    with naming_disk_errors(wanted.directory, setting="--directory"):
        shutil.rmtree(new, ignore_errors=True)  # left by a killed command
        new.mkdir(parents=True)
        try:
            _write_all(wanted, _filtered(wanted, new / "rows.arrow", print_line), new, print_line)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _filtered(
    wanted: Preparation, path: Path, print_line: Callable[[str], None]
) -> datasets.Dataset:
    """Every row and what the rules say of it, in the file `path`."""
    with pyarrow.ipc.new_stream(str(path), _SCHEMA) as stream:
        for name, file in wanted.files.items():
            records, count = read_file(file, wanted.columns), 0
            while batch := list(islice(records, _BATCH_ROWS)):
                placed = [(f"{name}:{number}", record) for number, record in batch]
                rows = map(_row, placed, wanted.rules.apply(placed))
                stream.write_batch(pyarrow.RecordBatch.from_pylist(list(rows), schema=_SCHEMA))
                count += len(batch)
            print_line(f"{name}: {count:,} rows")
    return datasets.Dataset.from_file(str(path))


def _row(placed: tuple[str, Any], found: Kept | Dropped) -> dict[str, Any]:
    row: dict[str, Any] = {"source": placed[0], "reason": "", **vars(found)}
    if isinstance(found, Dropped):
        row["detail"] = found.detail[:_DETAIL_CHARACTERS].encode(errors="replace").decode()
    else:
        problem = problem_key(found.problem)  # normalised: near-duplicates share a key
        row["key"] = hashlib.blake2b(problem.encode(), digest_size=8).hexdigest()
    return row


def _write_all(
    wanted: Preparation, rows: datasets.Dataset, new: Path, print_line: Callable[[str], None]
) -> None:
    """Write all files into the directory `new`, then rename them into that of the preparation."""
    columns = {name: rows.data.column(name).to_pylist() for name in ("reason", "key", *_NUMBERS)}
    kept = [row for row, reason in enumerate(columns["reason"]) if not reason]
    dropped = [row for row, reason in enumerate(columns["reason"]) if reason]
    counts = _counts(columns)
    for reason, number in counts["dropped"].items():
        print_line(f"dropped {number:,}: {reason}")
    if not kept:
        why = " ".join(rows[0][name] for name in ("source", "reason", "detail")) if dropped else ""
        raise DataError(
            f"{wanted.origin}: none of {len(dropped)} rows is kept; the first one: {why}. "
            "Check --recipe and the columns"
        )
    order = shuffled(columns["key"], kept, wanted.seed)
    sets: list[Sequence[int]] = [order]
    if wanted.sft_rows is not None:
        sets = [*split_rows(columns["key"], order, wanted.sft_rows), order]
    outputs: dict[str, Any] = {}
    for name, chosen in zip(wanted.outputs, sets, strict=True):
        texts = _records(rows, chosen, ("problem", "answer", "solution", "source"))
        outputs[f"{name}.jsonl"] = {"rows": len(chosen), **_write(new / f"{name}.jsonl", texts)} | {
            column: _statistics([columns[column][row] for row in chosen]) for column in _NUMBERS
        }
        print_line(f"{len(chosen):,} rows: {wanted.directory / name}.jsonl")
    others = {f"{wanted.name}{DROPPED}": _records(rows, dropped, ("source", "reason", "detail"))}
    if wanted.writes_benchmarks:
        for benchmark, problems in wanted.rules.benchmarks.items():
            others[benchmark] = ({"problem": r.problem, "answer": r.answer} for r in problems)
    for name, records in others.items():
        outputs[f"{name}.jsonl"] = _write(new / f"{name}.jsonl", records)
    facts = _facts(wanted) | {"counts": counts, "outputs": outputs}
    manifest = f"{wanted.name}.manifest.json"
    (new / manifest).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (wanted.directory / manifest).unlink(missing_ok=True)
    for name in (*outputs, manifest):
        os.replace(new / name, wanted.directory / name)
    print_line(f"hashes, counts and lengths: {wanted.directory / manifest}")


def _facts(wanted: Preparation) -> dict[str, Any]:
    """What the outputs depend on: the first part of the manifest."""
    rules = wanted.rules
    return {
        "name": wanted.name,
        "origin": wanted.origin,
        "settings": {
            "recipe": wanted.recipe,
            "columns": None if rules.openr1 else rules.columns.model_dump(),
            "max_tokens": rules.max_tokens,
            "sft_rows": wanted.sft_rows,
            "seed": wanted.seed,
        },
        "tokenizer_sha256": hashlib.sha256(rules.tokenizer_json.encode()).hexdigest(),
        "benchmarks": {name: len(rows) for name, rows in rules.benchmarks.items()},
        "inputs": [{"name": name, **_size_and_hash(path)} for name, path in wanted.files.items()],
        "versions": {
            "python": platform.python_version(),
            "unicode": unicodedata.unidata_version,
            **{package: version(package) for package in _PACKAGES},
        },
    }


def _statistics(lengths: Sequence[int]) -> dict[str, float] | None:
    """Mean, median, 95th percentile and maximum of lengths in tokens; 0 is a missing text."""
    found = [length for length in lengths if length]
    if not found:
        return None
    p50, p95, longest = np.percentile(found, (50, 95, 100), method="lower").tolist()
    return {"mean": round(sum(found) / len(found), 1), "p50": p50, "p95": p95, "max": longest}


def _counts(columns: dict[str, list[Any]]) -> dict[str, Any]:
    reasons = Counter(columns["reason"])
    kept = reasons.pop("", 0)
    return {
        "read": kept + reasons.total(),
        "kept": kept,
        "repeated_problems": kept - len({key for key in columns["key"] if key is not None}),
        "contaminated": sum(n for reason, n in reasons.items() if reason.startswith(CONTAMINATED)),
        "dropped": dict(sorted(reasons.items())),
    }


def _records(
    rows: datasets.Dataset, numbers: Sequence[int], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """These rows with these columns, without the columns that are null."""
    chosen = rows.select_columns(list(columns)).select(numbers).with_format("arrow")
    for batch in cast("Iterator[pyarrow.Table]", chosen.iter(_BATCH_ROWS)):
        for row in batch.to_pylist():
            yield {column: value for column, value in row.items() if value is not None}


def _write(path: Path, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Write JSON Lines; what the manifest says of the file."""
    with path.open("wb") as file:
        for record in records:
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    return _size_and_hash(path)


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def shuffled(keys: Sequence[str], rows: Sequence[int], seed: int) -> list[int]:
    """The rows in the order of a hash of seed and key; rows of one problem in the input's order.

    It depends neither on other rows nor on a random generator. `keys` are those of all rows of
    the input.
    """

    def rank(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{keys[row]}".encode(), digest_size=8).digest()

    return sorted(rows, key=rank)


def split_rows(
    keys: Sequence[str], order: Sequence[int], num_first: int
) -> tuple[list[int], list[int]]:
    """The first `num_first` rows of the order, for the supervised run, and the others.

    Rows of one problem stay together, so that no distillation prompt is trained on before.

    Raises:
        DataError: fewer than num_first + 1 rows.
    """
    if len(order) <= num_first:
        raise DataError(
            f"{len(order)} rows are kept, too few for {num_first} supervised rows and any prompts "
            f"of the distillation; lower --sft-rows below {len(order)}, raise --max-tokens, or "
            "give more data with --source"
        )
    first: list[int] = []
    second: list[int] = []
    for _, group in groupby(order, key=keys.__getitem__):
        rows = list(group)
        (first if len(first) + len(rows) <= num_first else second).extend(rows)
    return first, second
