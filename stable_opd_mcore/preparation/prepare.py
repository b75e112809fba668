"""Makes training sets of a data set: filter its files, split the rows, write them all at once.

Finished files stay in `DIRECTORY/.prepare-NAME/` until all outputs are written, so the same command
continues after a kill and writes the same bytes. Outputs are renamed into place together, the
manifest last: a kill at any moment leaves either no manifest or a complete set. Memory holds hashes
and lengths of rows, never all texts.
"""

# Not strict: datasets has no types.
# pyright: basic

import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from hashlib import file_digest
from itertools import islice
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow

from stable_opd_mcore.data.sources import read_file
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.host.atomic_files import atomic_file, naming_disk_errors
from stable_opd_mcore.host.run_lock import RunLock
from stable_opd_mcore.host.worker_processes import end_with_parent
from stable_opd_mcore.preparation.datasheet import datasheet, lengths_entry
from stable_opd_mcore.preparation.job import DROPPED, InputFile, Job, digest
from stable_opd_mcore.preparation.openr1 import Dropped
from stable_opd_mcore.preparation.rules import CONTAMINATED, Rules, RuleSettings
from stable_opd_mcore.preparation.split import row_key, shuffled, split_rows

_TEXTS = ("source", "reason", "detail", "key", "problem", "answer", "solution")
_NUMBERS = ("problem_tokens", "solution_tokens")
# A filtered row; reason "" is a kept one.
_SCHEMA = pyarrow.schema(
    [(name, pyarrow.string()) for name in _TEXTS] + [(name, pyarrow.int32()) for name in _NUMBERS]
)
_BATCH_ROWS = 64
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
    with naming_disk_errors(job.directory, setting="--directory"), RunLock(job.spool):
        if is_prepared(job):
            tell(f"{job.manifest}: made by this command before, and its files are intact")
        else:
            folder = job.spool / digest(job.facts["filter"])
            for other in job.spool.iterdir():
                if other.is_dir() and other != folder:
                    shutil.rmtree(other)
            _write_all(job, _filtered(job, folder, tell), folder / "new", tell)
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


def _filtered(job: Job, folder: Path, tell: Callable[[str], None]) -> datasets.Dataset:
    """Every row and what the rules say of it. Finished files are kept in `folder`."""
    folder.mkdir(exist_ok=True)
    finished = [folder / f"{number:05d}.arrow" for number in range(len(job.files))]
    with _processes(job) as run:
        for file, path in zip(job.files, finished, strict=True):
            if path.is_file():
                tell(f"{file.name}: finished before")
                continue
            records, count = read_file(file.path, job.columns), 0
            batches = iter(lambda: list(islice(records, _BATCH_ROWS)), [])  # noqa: B023, used here
            with atomic_file(path) as out, pyarrow.ipc.new_stream(out, _SCHEMA) as stream:
                for rows in run(partial(_apply, file), batches):
                    stream.write_batch(rows)
                    count += len(rows)
            tell(f"{file.name}: {count:,} rows")
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(p)) for p in finished])


@contextmanager
def _processes(job: Job) -> Iterator[Callable[..., Iterator[pyarrow.RecordBatch]]]:
    """Yield a `map` that runs in processes; with one process in this one."""
    if job.num_processes == 1:
        _start_process(job.rules)
        yield map
        return
    spawn = multiprocessing.get_context("spawn")  # pyarrow has threads, which a fork would lose
    try:
        with ProcessPoolExecutor(job.num_processes, spawn, _start_process, (job.rules,)) as pool:
            yield partial(_in_order, pool, 4 * job.num_processes)
    except BrokenProcessPool as error:
        raise UserError(
            "a process of the preparation was killed, perhaps for want of memory; finished files "
            "are kept. Start it again with fewer --processes"
        ) from error


def _in_order(
    pool: ProcessPoolExecutor, ahead: int, function: Callable[..., Any], inputs: Iterator[Any]
) -> Iterator[Any]:
    """As `map`; at most `ahead` inputs are in memory."""
    started: deque[Future[Any]] = deque()
    for one in inputs:
        started.append(pool.submit(function, one))
        if len(started) == ahead:
            yield started.popleft().result()
    yield from (future.result() for future in started)


def _start_process(settings: RuleSettings) -> None:
    global _rules
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # the parent says that it ended
        end_with_parent()
    _rules = Rules(settings)


def _apply(file: InputFile, records: Sequence[tuple[int, Any]]) -> pyarrow.RecordBatch:
    """What the rules say of numbered records, in the columns of _SCHEMA."""
    assert _rules is not None
    rows: list[dict[str, Any]] = []
    for number, record in records:
        name = f"{file.name}:{number}"
        found = _rules.apply(record, name)
        row: dict[str, Any] = {"source": name, "reason": "", **vars(found)}
        if isinstance(found, Dropped):
            detail = found.detail[:_DETAIL_CHARACTERS]
            row["detail"] = detail.encode(errors="replace").decode()
        else:
            row["key"] = row_key(found.problem)
        rows.append(row)
    return pyarrow.RecordBatch.from_pylist(rows, schema=_SCHEMA)


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
    others = {f"{job.name}{DROPPED}": _records(rows, dropped, ("source", "reason", "detail"))}
    if job.writes_benchmarks:
        for benchmark, problems in job.rules.benchmarks.items():
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
    for batch in cast("Iterator[dict[str, list[Any]]]", chosen.iter(_BATCH_ROWS)):
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
