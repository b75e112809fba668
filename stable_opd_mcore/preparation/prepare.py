"""Makes training sets of a data set: filter its files, split the rows, write them all at once.

Finished files stay in `DIRECTORY/.prepare-NAME/` until all outputs are written, so the same command
continues after a kill and writes the same bytes. Outputs are renamed into place together, the
manifest last: a kill at any moment leaves either no manifest or a complete set. Memory holds hashes
and lengths of rows, never all texts.
"""

# Not strict: datasets has no types.
# pyright: basic

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from hashlib import file_digest
from itertools import accumulate, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import datasets

from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.host.atomic_files import atomic_directory, describe_space
from stable_opd_mcore.host.json_files import object_in_line
from stable_opd_mcore.host.run_lock import RunLock
from stable_opd_mcore.host.worker_processes import end_with_parent
from stable_opd_mcore.preparation.datasheet import datasheet, lengths_entry
from stable_opd_mcore.preparation.inputs import BATCH_ROWS, load_file
from stable_opd_mcore.preparation.job import Job, digest
from stable_opd_mcore.preparation.records import Dropped, InputFile
from stable_opd_mcore.preparation.rules import CONTAMINATED, Rules, RuleSettings
from stable_opd_mcore.preparation.split import row_key, shuffled, split_rows

_TEXTS = ("source", "reason", "detail", "key", "problem", "answer", "solution")
_NUMBERS = ("problem_tokens", "solution_tokens")
# A filtered row; reason "" is a kept one.
_FEATURES = datasets.Features(
    {name: datasets.Value("string") for name in _TEXTS}
    | {name: datasets.Value("int32") for name in _NUMBERS}
)
_DETAIL_CHARACTERS = 300
_rules: Rules | None = None  # of this process


def prepare_data(job: Job, tell: Callable[[str], None]) -> None:
    """Write the outputs of a recipe, the benchmarks, the dropped rows, manifest and datasheet.

    Args:
        tell: gets a line of progress or result at a time.

    Raises:
        UserError: an unreadable file, too few rows, a full disk, a process that was killed, another
            preparation at work in the same place.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with _naming_full_disk(job.directory), RunLock(job.spool):
        if is_prepared(job):
            tell(f"{job.manifest}: made by this command before, and its files are intact")
        else:
            folder = job.spool / digest(job.facts["filter"])
            for other in job.spool.iterdir():
                if other.is_dir() and other != folder:
                    shutil.rmtree(other)
            rows = datasets.concatenate_datasets(_filtered(job, folder, tell))
            _write_all(job, rows, folder / "new", tell)
        shutil.rmtree(job.spool)


def is_prepared(job: Job) -> bool:
    """Whether the directory holds the manifest of this job and every file that it lists."""
    try:
        manifest = json.loads(job.manifest.read_bytes())
        same = all(manifest[key] == value for key, value in job.facts.items())
        return same and all(
            _size_and_hash(job.directory / name)["sha256"] == entry["sha256"]
            for name, entry in manifest["outputs"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _filtered(job: Job, folder: Path, tell: Callable[[str], None]) -> list[datasets.Dataset]:
    """Of each file its rows and what the rules say of them; kept in `folder` until all are done."""
    folder.mkdir(exist_ok=True)
    with _processes(job) as run:
        for number, file in enumerate(job.files):
            done = folder / f"{number:05d}"
            if done.is_dir():
                tell(f"{file.name}: finished before")
                continue
            with TemporaryDirectory(dir=folder) as cache, atomic_directory(done) as new:
                loaded = load_file(file, job.columns, Path(cache))
                count = min(job.num_processes, len(loaded))
                shards = [loaded.shard(count, i, contiguous=True) for i in range(count)]
                firsts = accumulate(map(len, shards), initial=0)
                rows = datasets.concatenate_datasets(
                    list(run(_apply, shards, firsts, repeat(file)))
                )
                rows.save_to_disk(str(new))
            tell(f"{file.name}: {len(rows):,} rows")
    return [datasets.Dataset.load_from_disk(str(path)) for path in sorted(folder.glob("0*"))]


@contextmanager
def _processes(job: Job) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a `map` that runs in processes; with one process in this one."""
    if job.num_processes == 1:
        _start_process(job.rules)
        yield map
        return
    spawn = multiprocessing.get_context("spawn")  # pyarrow has threads, which a fork would lose
    try:
        with ProcessPoolExecutor(job.num_processes, spawn, _start_process, (job.rules,)) as pool:
            yield pool.map
    except BrokenProcessPool as error:
        raise UserError(
            "a process of the preparation was killed, perhaps for want of memory; finished files "
            "are kept. Start it again with fewer --processes"
        ) from error


def _start_process(settings: RuleSettings) -> None:
    global _rules
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # the parent says that it ended
        end_with_parent()
        datasets.disable_progress_bars()
    _rules = Rules(settings)


def _apply(shard: datasets.Dataset, first: int, file: InputFile) -> datasets.Dataset:
    """The columns of _FEATURES for a shard, whose first row has this number in the file."""
    return shard.map(
        _apply_to_batch,
        fn_kwargs={"first": first, "file": file},
        with_indices=True,
        batched=True,
        batch_size=BATCH_ROWS,
        writer_batch_size=BATCH_ROWS,
        remove_columns=shard.column_names,
        features=_FEATURES,
        new_fingerprint=f"{file.sha256[:16]}-{first}",
    )


def _apply_to_batch(
    batch: dict[str, list[Any]], indices: list[int], first: int, file: InputFile
) -> dict[str, list[Any]]:
    assert _rules is not None
    filtered: dict[str, list[Any]] = {name: [] for name in _FEATURES}
    for place, index in enumerate(indices):
        number, record = first + index, {name: values[place] for name, values in batch.items()}
        if "line" in record:
            number = record["number"]
            record = object_in_line(record["line"], f"{file.path}:{number}")
        name = f"{file.name}:{number}"
        found = _rules.apply(record, name)
        values: dict[str, Any] = {"source": name, "reason": "", **vars(found)}
        if isinstance(found, Dropped):
            detail = found.detail[:_DETAIL_CHARACTERS]
            values["detail"] = detail.encode(errors="replace").decode()
        else:
            values["key"] = row_key(found.problem)
        for column, rows in filtered.items():
            rows.append(values.get(column))
    return filtered


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
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    outputs: dict[str, Any] = {}
    for name, chosen in zip(job.outputs, sets, strict=True):
        texts = _records(rows, chosen, ("problem", "answer", "solution", "source"))
        lengths = ([columns[column][row] for row in chosen] for column in _NUMBERS)
        outputs[f"{name}.jsonl"] = _write(new / f"{name}.jsonl", texts) | lengths_entry(*lengths)
        tell(f"{len(chosen):,} rows: {job.directory / name}.jsonl")
    others = {f"{job.name}_dropped": _records(rows, dropped, ("source", "reason", "detail"))}
    if job.writes_benchmarks:
        for benchmark, problems in job.benchmarks.items():
            others[benchmark] = ({"problem": r.problem, "answer": r.answer} for r in problems)
    for name, records in others.items():
        outputs[f"{name}.jsonl"] = _write(new / f"{name}.jsonl", records)
    manifest = job.facts | {"counts": counts, "outputs": outputs}
    sheet = f"{job.name}.datasheet.md"
    (new / sheet).write_text(datasheet(manifest), encoding="utf-8")
    outputs[sheet] = _size_and_hash(new / sheet)
    (new / job.manifest.name).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    job.manifest.unlink(missing_ok=True)
    for name in (*outputs, job.manifest.name):
        os.replace(new / name, job.directory / name)
    tell(f"hashes, counts and lengths: {job.manifest}, {job.directory / sheet}")


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
    chosen = rows.select_columns(list(columns)).select(numbers)
    for batch in cast("Iterator[dict[str, list[Any]]]", chosen.iter(BATCH_ROWS)):
        for values in zip(*(batch[column] for column in columns), strict=True):
            named = zip(columns, values, strict=True)
            yield {column: value for column, value in named if value is not None}


def _write(path: Path, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Write JSON Lines; what the manifest says of the file."""
    with path.open("wb") as file:
        for record in records:
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    return _size_and_hash(path)


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": file_digest(file, "sha256").hexdigest()}


@contextmanager
def _naming_full_disk(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{directory}: the disk is full ({describe_space(directory, 0)}); make room and start "
            "the same command again, it continues"
        ) from error
