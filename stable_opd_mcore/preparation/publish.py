"""Writes the outputs of a preparation from its finished parts.

Every file is written beside the parts and then renamed; the manifest is the last one. A kill at any
moment leaves either no manifest or a complete set. Memory holds numbers of rows, never their texts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation.datasheet import datasheet, output_entry
from stable_opd_mcore.preparation.job import Job
from stable_opd_mcore.preparation.rules import CONTAMINATED
from stable_opd_mcore.preparation.split import KeptTable, shuffled, split_rows
from stable_opd_mcore.preparation.spool import read_result, rows_path


def publish(job: Job, facts: dict[str, Any], folder: Path, tell: Callable[[str], None]) -> None:
    """Write all files into the request's directory, the manifest last.

    Args:
        facts: the manifest's first part.
        folder: holds the finished parts.

    Raises:
        DataError: too few rows are kept.
    """
    table, counts = _gather(job, folder)
    for reason, number in counts["dropped"].items():
        tell(f"dropped {number:,}: {reason}")
    if not len(table):
        raise DataError(
            f"{job.request.source}: none of {counts['read']} rows is kept; {_why(job, folder)}"
        )
    order = shuffled(table, job.request.seed)
    rows = dict(zip(job.outputs, _divide(job, table, order), strict=True))
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    outputs: dict[str, Any] = {}
    for name, chosen in rows.items():
        written = _write(new / f"{name}.jsonl", _texts(folder, table, chosen))
        lengths = [
            [column[row] for row in chosen]
            for column in (table.problem_tokens, table.solution_tokens)
        ]
        outputs[f"{name}.jsonl"] = output_entry(*written, *lengths)
        tell(f"{len(chosen):,} rows: {job.request.directory / name}.jsonl")
    outputs |= _write_others(job, folder, new)
    manifest = facts | {"counts": counts, "outputs": outputs}
    sheet = f"{job.name}.datasheet.md"
    digest, size = _write(new / sheet, [datasheet(manifest).encode()])
    outputs[sheet] = {"bytes": size, "sha256": digest}
    _write(new / job.manifest.name, [(json.dumps(manifest, indent=1) + "\n").encode()])
    job.manifest.unlink(missing_ok=True)
    for name in (*outputs, job.manifest.name):
        os.replace(new / name, job.request.directory / name)
    tell(f"hashes, counts and lengths: {job.manifest}, {job.request.directory / sheet}")


def is_published(job: Job, facts: dict[str, Any]) -> bool:
    """Whether the directory holds the manifest of this job and every file that it lists."""
    try:
        manifest = json.loads(job.manifest.read_bytes())
        same = all(manifest[key] == value for key, value in facts.items())
        outputs = {job.request.directory / n: e["sha256"] for n, e in manifest["outputs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return same and all(path.is_file() and _sha256(path) == d for path, d in outputs.items())


def _gather(job: Job, folder: Path) -> tuple[KeptTable, dict[str, Any]]:
    table = KeptTable()
    dropped: Counter[str] = Counter()
    num_read = 0
    for part in range(len(job.parts)):
        result = read_result(folder, part)
        table.extend(part, result.kept)
        dropped.update(reason for _, reason, _ in result.dropped)
        num_read += result.num_rows
    assert num_read == len(table) + dropped.total()
    return table, {
        "read": num_read,
        "kept": len(table),
        "repeated_problems": table.num_repeated,
        "contaminated": sum(n for reason, n in dropped.items() if reason.startswith(CONTAMINATED)),
        "dropped": dict(sorted(dropped.items())),
    }


def _why(job: Job, folder: Path) -> str:
    for part in range(len(job.parts)):
        for name, reason, detail in read_result(folder, part).dropped:
            return f"the first one, {name}: {reason} {detail}".rstrip()
    return "the source has no rows"


def _divide(job: Job, table: KeptTable, order: Sequence[int]) -> list[Sequence[int]]:
    if not job.recipe.openr1:
        return [order]
    return [*split_rows(table, order, job.request.sft_rows), order]


def _texts(folder: Path, table: KeptTable, rows: Sequence[int]) -> Iterator[bytes]:
    for row in rows:
        with rows_path(folder, table.parts[row]).open("rb") as file:
            yield os.pread(file.fileno(), table.lengths[row], table.offsets[row])


def _write_others(job: Job, folder: Path, new: Path) -> dict[str, Any]:
    """The dropped rows, and the benchmarks unless they are read from this directory."""
    name = f"{job.name}_dropped.jsonl"
    digest, size = _write(new / name, _dropped_lines(job, folder))
    written = {name: {"bytes": size, "sha256": digest}}
    if job.request.write_benchmarks:
        for benchmark, rows in job.request.benchmarks.items():
            digest, size = _write(new / f"{benchmark}.jsonl", map(_benchmark_line, rows))
            written[f"{benchmark}.jsonl"] = {"bytes": size, "sha256": digest}
    return written


def _dropped_lines(job: Job, folder: Path) -> Iterator[bytes]:
    for part in range(len(job.parts)):
        for name, reason, detail in read_result(folder, part).dropped:
            yield _json_line({"source": name, "reason": reason, "detail": detail})


def _benchmark_line(row: Row) -> bytes:
    return _json_line({"problem": row.problem, "answer": row.answer})


def _json_line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False) + "\n").encode()


def _write(path: Path, pieces: Iterable[bytes]) -> tuple[str, int]:
    """The sha256 and the size of what is written."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
