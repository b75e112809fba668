"""Applies the rules to all parts, in processes, and keeps the results of finished parts on disk.

Of part 7 the folder holds `00007.jsonl`, the kept rows as they are written in the end, and
`00007.json`, the numbers of these rows and every dropped row with its reason. The second file is
written last: a part without it is done again after a restart. Not here: the split of the kept rows
(split.py).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from pathlib import Path

from stable_opd_mcore.data.decontamination import problem_key
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.worker_processes import end_with_parent
from stable_opd_mcore.preparation.inputs import read_part
from stable_opd_mcore.preparation.records import Dropped, Kept, Part
from stable_opd_mcore.preparation.rules import Rules, RuleSettings

_TELL_SECONDS = 5.0
_DETAIL_CHARACTERS = 300
_rules: Rules | None = None  # of this process


@dataclass(frozen=True)
class KeptRow:
    """A kept row's place in its part's file, and what the split and the datasheet need of it."""

    key: str  # 16 hex digits, hashed from the normalised problem: near-duplicates share it
    offset: int  # bytes
    length: int  # bytes
    problem_tokens: int
    solution_tokens: int


@dataclass(frozen=True)
class PartResult:
    """What is known of a finished part without its texts."""

    num_rows: int
    kept: tuple[KeptRow, ...]
    dropped: tuple[tuple[str, str, str], ...]  # row name, reason, detail


def run_parts(
    parts: Sequence[Part],
    columns: Sequence[str],
    settings: RuleSettings,
    folder: Path,
    num_processes: int,
    tell: Callable[[str], None],
) -> None:
    """Finish every part that has no result yet.

    Args:
        columns: read from parquet files.
        folder: where the results are; of one set of inputs and settings only.
        num_processes: 1 runs in this process.

    Raises:
        UserError: a process was killed.
        DataError: a file that cannot be read.
    """
    todo = [i for i in range(len(parts)) if not summary_path(folder, i).is_file()]
    if len(todo) < len(parts):
        tell(f"{len(parts) - len(todo)} of {len(parts)} parts were finished before")
    progress = _Progress(sum(parts[i].num_rows for i in todo), tell)
    jobs = ((index, parts[index], columns, folder) for index in todo)
    if num_processes == 1 or len(todo) <= 1:
        _start_process(settings)
        for job in jobs:
            progress.add(_run_part(*job))
        return
    _run_in_processes(jobs, settings, min(num_processes, len(todo)), progress)


def read_result(folder: Path, index: int) -> PartResult:
    """The summary of a finished part."""
    values = json.loads(summary_path(folder, index).read_bytes())
    return PartResult(
        values["num_rows"],
        tuple(KeptRow(*row) for row in values["kept"]),
        tuple((name, reason, detail) for name, reason, detail in values["dropped"]),
    )


def rows_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.jsonl"


def summary_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.json"


class _Progress:
    """Tells the rows done, at most every few seconds."""

    def __init__(self, num_rows: int, tell: Callable[[str], None]) -> None:
        self._num_rows, self._tell = num_rows, tell
        self._done = 0
        self._start = self._told = time.monotonic()

    def add(self, num_rows: int) -> None:
        self._done += num_rows
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS or self._done == self._num_rows:
            self._told = now
            rate = self._done / max(now - self._start, 1e-9)
            left = (self._num_rows - self._done) / rate
            self._tell(
                f"{self._done:,} of {self._num_rows:,} rows, {rate:,.0f} rows/s, {left:.0f} s left"
            )


def _run_in_processes(
    jobs: Iterator[tuple[int, Part, Sequence[str], Path]],
    settings: RuleSettings,
    num_processes: int,
    progress: _Progress,
) -> None:
    context = multiprocessing.get_context("spawn")  # pyarrow has threads, which a fork would lose
    running: set[Future[int]] = set()
    with ProcessPoolExecutor(num_processes, context, _start_process, (settings,)) as pool:
        try:
            for job in jobs:
                running.add(pool.submit(_run_part, *job))
                if len(running) > 2 * num_processes:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        progress.add(future.result())
            for future in running:
                progress.add(future.result())
        except BrokenProcessPool as error:
            raise UserError(
                "a process of the preparation was killed, perhaps for want of memory; finished "
                "parts are kept. Start it again with fewer --processes"
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start_process(settings: RuleSettings) -> None:
    global _rules
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        end_with_parent()
    _rules = Rules(settings)


def _run_part(index: int, part: Part, columns: Sequence[str], folder: Path) -> int:
    """Apply the rules to one part and write its results; the number of its rows."""
    assert _rules is not None
    kept: list[KeptRow] = []
    dropped: list[tuple[str, str, str]] = []
    num_rows = offset = 0
    with rows_path(folder, index).open("wb") as file:
        for number, record in read_part(part, columns):
            num_rows += 1
            name = f"{part.file.name}:{number}"
            row = _rules.apply(record, name)
            if isinstance(row, Dropped):
                dropped.append((name, row.reason, row.detail[:_DETAIL_CHARACTERS]))
                continue
            line = _line(row, name)
            file.write(line)
            kept.append(
                KeptRow(
                    _key(row.problem), offset, len(line), row.problem_tokens, row.solution_tokens
                )
            )
            offset += len(line)
    summary = {"num_rows": num_rows, "kept": [astuple(row) for row in kept], "dropped": dropped}
    write_atomically(summary_path(folder, index), json.dumps(summary).encode())
    return part.num_rows


def _key(problem: str) -> str:
    return hashlib.blake2b(problem_key(problem).encode(), digest_size=8).hexdigest()


def _line(row: Kept, name: str) -> bytes:
    values = {"problem": row.problem, "answer": row.answer, "solution": row.solution}
    given = {column: text for column, text in values.items() if text is not None}
    return (json.dumps({**given, "source": name}, ensure_ascii=False) + "\n").encode()
