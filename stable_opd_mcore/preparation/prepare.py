"""Makes training sets of a data set: filter its files, split the rows, write them all at once.

Outputs are renamed into place together, the manifest last: a kill at any moment leaves either no
manifest or a complete set. Memory holds hashes and lengths of rows, never all texts. Not here:
which rows are kept (rules.py), the page for people (datasheet.py).
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
import pyarrow

from stable_opd_mcore.data.decontamination import problem_key
from stable_opd_mcore.data.sources import read_file
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import naming_disk_errors
from stable_opd_mcore.preparation.datasheet import datasheet, lengths_entry
from stable_opd_mcore.preparation.job import DROPPED, Job
from stable_opd_mcore.preparation.openr1 import Dropped
from stable_opd_mcore.preparation.rules import CONTAMINATED, Kept

_TEXTS = ("source", "reason", "detail", "key", "problem", "answer", "solution")
_NUMBERS = ("problem_tokens", "solution_tokens")
# A filtered row; reason "" is a kept one.
_SCHEMA = pyarrow.schema(
    [(name, pyarrow.string()) for name in _TEXTS] + [(name, pyarrow.int32()) for name in _NUMBERS]
)
_BATCH_ROWS = 32
_DETAIL_CHARACTERS = 300
_PACKAGES = ("stable-opd-mcore", "tokenizers", "pyarrow", "datasets")


def prepare_data(job: Job, tell: Callable[[str], None]) -> None:
    """Write the outputs of a recipe, the benchmarks, the dropped rows, manifest and datasheet.

    Args:
        tell: gets a line of progress or result at a time.

    Raises:
        UserError: an unreadable file, too few rows, a full disk.
    """
    new = job.directory / f".prepare-{job.name}"
    with naming_disk_errors(job.directory, setting="--directory"):
        shutil.rmtree(new, ignore_errors=True)  # of a killed command
        new.mkdir(parents=True)
        try:
            _write_all(job, _filtered(job, new / "rows.arrow", tell), new, tell)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _filtered(job: Job, path: Path, tell: Callable[[str], None]) -> datasets.Dataset:
    """Every row and what the rules say of it, in the file `path`."""
    with pyarrow.ipc.new_stream(str(path), _SCHEMA) as stream:
        for name, file in job.files.items():
            records, count = read_file(file, job.columns), 0
            while batch := list(islice(records, _BATCH_ROWS)):
                placed = [(f"{name}:{number}", record) for number, record in batch]
                rows = map(_row, placed, job.rules.apply(placed))
                stream.write_batch(pyarrow.RecordBatch.from_pylist(list(rows), schema=_SCHEMA))
                count += len(batch)
            tell(f"{name}: {count:,} rows")
    return datasets.Dataset.from_file(str(path))


def _row(placed: tuple[str, Any], found: Kept | Dropped) -> dict[str, Any]:
    """A filtered row, in the columns of _SCHEMA."""
    row: dict[str, Any] = {"source": placed[0], "reason": "", **vars(found)}
    if isinstance(found, Dropped):
        row["detail"] = found.detail[:_DETAIL_CHARACTERS].encode(errors="replace").decode()
    else:
        row["key"] = row_key(found.problem)
    return row


def _write_all(job: Job, rows: datasets.Dataset, new: Path, tell: Callable[[str], None]) -> None:
    """Write all files into the directory `new`, then rename them into the job's."""
    columns = {name: rows.data.column(name).to_pylist() for name in ("reason", "key", *_NUMBERS)}
    kept = [row for row, reason in enumerate(columns["reason"]) if not reason]
    dropped = [row for row, reason in enumerate(columns["reason"]) if reason]
    counts = _counts(columns)
    for reason, number in counts["dropped"].items():
        tell(f"dropped {number:,}: {reason}")
    if not kept:
        why = " ".join(rows[0][name] for name in ("source", "reason", "detail")) if dropped else ""
        raise DataError(f"{job.origin}: none of {len(dropped)} rows is kept; the first one, {why}")
    order = shuffled(columns["key"], kept, job.seed)
    sets: list[Sequence[int]] = [order]
    if job.sft_rows is not None:
        sets = [*split_rows(columns["key"], order, job.sft_rows), order]
    outputs: dict[str, Any] = {}
    for name, chosen in zip(job.outputs, sets, strict=True):
        texts = _records(rows, chosen, ("problem", "answer", "solution", "source"))
        lengths = ([columns[column][row] for row in chosen] for column in _NUMBERS)
        outputs[f"{name}.jsonl"] = _write(new / f"{name}.jsonl", texts) | lengths_entry(*lengths)
        tell(f"{len(chosen):,} rows: {job.directory / name}.jsonl")
    others = {f"{job.name}{DROPPED}": _records(rows, dropped, ("source", "reason", "detail"))}
    if job.writes_benchmarks:
        for benchmark, problems in job.rules.benchmarks.items():
            others[benchmark] = ({"problem": r.problem, "answer": r.answer} for r in problems)
    for name, records in others.items():
        outputs[f"{name}.jsonl"] = _write(new / f"{name}.jsonl", records)
    facts = _facts(job) | {"counts": counts, "outputs": outputs}
    sheet, manifest = f"{job.name}.datasheet.md", f"{job.name}.manifest.json"
    (new / sheet).write_text(datasheet(facts), encoding="utf-8")
    outputs[sheet] = _size_and_hash(new / sheet)
    (new / manifest).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (job.directory / manifest).unlink(missing_ok=True)
    for name in (*outputs, manifest):
        os.replace(new / name, job.directory / name)
    tell(f"hashes, counts and lengths: {job.directory / manifest}, {job.directory / sheet}")


def _facts(job: Job) -> dict[str, Any]:
    """What the outputs depend on: the first part of the manifest."""
    rules = job.rules
    pattern = rules.control_tokens
    problems = {
        name: json.dumps([(row.row_id, row.problem) for row in rows])
        for name, rows in rules.benchmarks.items()
    }
    return {
        "name": job.name,
        "origin": job.origin,
        "settings": {
            "recipe": job.recipe,
            "max_tokens": rules.max_tokens,
            "sft_rows": job.sft_rows,
            "seed": job.seed,
        },
        "filter": {
            "openr1": rules.openr1,
            "columns": rules.columns.model_dump(),
            "max_tokens": rules.max_tokens,
            "tokenizer_sha256": _sha256(rules.tokenizer_json),
            "control_tokens": None if pattern is None else pattern.pattern,
            "benchmarks": {
                name: {"rows": len(rows), "sha256": _sha256(problems[name])}
                for name, rows in rules.benchmarks.items()
            },
            "inputs": [{"name": name, **_size_and_hash(path)} for name, path in job.files.items()],
            "versions": {
                "python": platform.python_version(),
                "unicode": unicodedata.unidata_version,
                **{package: version(package) for package in _PACKAGES},
            },
        },
    }


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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def row_key(problem: str) -> str:
    """16 hex digits, hashed from the normalised problem: near-duplicates share them."""
    return hashlib.blake2b(problem_key(problem).encode(), digest_size=8).hexdigest()


def shuffled(keys: Sequence[str], rows: Sequence[int], seed: int) -> list[int]:
    """The rows in the order of a hash of seed and key; rows of one problem in the input's order.

    It depends on nothing else: not on other rows, nor on a random generator.

    Args:
        keys: `row_key` of every row of the input.
        rows: numbers of those that are ordered.
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
            f"{len(order)} rows are kept, which is too few for {num_first} supervised rows and "
            f"the prompts of the distillation; lower --sft-rows below {len(order)}, raise "
            "--max-tokens, or give more data with --source"
        )
    first: list[int] = []
    second: list[int] = []
    for _, group in groupby(order, key=keys.__getitem__):
        rows = list(group)
        (first if len(first) + len(rows) <= num_first else second).extend(rows)
    return first, second
