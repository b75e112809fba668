"""`stable-opd score`: grade and measure a file of generations, with the code of a run.

Rows stream through grading workers; one verdict per row is appended to a file, in the order of the
rows. The summary is computed from that file alone, so a run that was killed and started again gives
what an uninterrupted one gives. Memory does not grow with the file. Not here: reading rows
(score_rows.py), the numbers (data/responses.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stable_opd_mcore.config.evaluation import MonitoringConfig
from stable_opd_mcore.data.repetition import PAPER_TAIL_CHARACTERS
from stable_opd_mcore.data.responses import CompressionLimits, compression_limits, measure
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.grading import Grader, GradingItem, Verdict
from stable_opd_mcore.evaluation.score_rows import (
    Columns,
    RefusedRow,
    ScoreRow,
    find_columns,
    parse_row,
    read_lines,
)
from stable_opd_mcore.evaluation.score_summary import ScoreSummary, summarise
from stable_opd_mcore.host.atomic_files import write_atomically

MAX_GROUPS = 1000
_FIRST_BYTES = 2**20  # of the source, whose hash tells another file
_SECONDS_BETWEEN_LINES = 30.0
_Record = dict[str, Any]


@dataclass(frozen=True)
class ScoreSettings:
    """How to score a file."""

    columns: Columns = field(default_factory=Columns)  # None where the usual names are looked for
    tokenizer: str | None = None  # model directory; makes the token ids of rows that have none
    max_length: int | None = None  # length budget, in tokens, or in characters without tokens
    tail_characters: int | None = None  # None: as in a run with this budget, at most 10,000
    ratio: float = 10.0
    timeout_seconds: float = 10.0
    workers: int | None = None  # None: one for each core


def score_file(
    path: Path,
    output: Path,
    settings: ScoreSettings,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreSummary:
    """Score `path`; write `output`/verdicts.jsonl and `output`/summary.json.

    Continues where an earlier call was interrupted.

    Args:
        progress: called with the number of rows read and the bytes they take.

    Raises:
        UserError: no such file, no column for the response, more than 1,000 groups, an `output`
            of another file, of other settings, or in use.
    """
    if not path.is_file():
        found = "a directory" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {found}; give a file of JSON Lines")
    settings = replace(settings, columns=find_columns(path, settings.columns))
    header = _header(path, settings)
    output.mkdir(parents=True, exist_ok=True)
    verdicts = output / "verdicts.jsonl"
    with verdicts.open("a+b") as file:
        _lock(file, verdicts)
        done = _resume(file, header, verdicts)
        writer = _OrderedWriter(file, done + 1)
        workers = settings.workers or len(os.sched_getaffinity(0))
        with path.open("rb") as source, Grader(settings.timeout_seconds, workers) as grader:
            scorer = _Scorer(settings, writer, progress)
            for index, verdict in grader.grade_stream(scorer.items(source, done)):
                scorer.finish(index, verdict)
        summary = _summary(file, header["unit"], settings.max_length, verdicts)
    write_atomically(output / "summary.json", summary.as_json().encode())
    return summary


@contextmanager
def shown_progress(path: Path) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error; elsewhere a line every 30 seconds."""
    total = path.stat().st_size if path.is_file() else 0
    console = Console(stderr=True)
    began = told = time.monotonic()
    first = 0  # row of this call; a continued one begins later
    columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("0 rows", total=total)

        def progress(rows: int, position: int) -> None:
            nonlocal told, first
            first = first or rows
            now = time.monotonic()
            if console.is_terminal:
                bar.update(task, completed=position, description=f"{rows:,} rows")
            elif now - told > _SECONDS_BETWEEN_LINES:
                told = now
                rate = (rows - first) / (now - began)
                console.print(f"{rows:,} rows, {position / total:.0%}, {rate:.0f} rows/s")

        yield progress


class _Scorer:
    """Gives rows to the grader and their records to the writer; holds the rows being graded."""

    def __init__(
        self,
        settings: ScoreSettings,
        writer: _OrderedWriter,
        progress: Callable[[int, int], None] | None,
    ):
        self._columns, self._max_length = settings.columns, settings.max_length
        self._limits = _limits(settings)
        self._encode = _encoder(settings)
        self._writer, self._progress = writer, progress
        self._num_items = 0
        self._groups: set[str] = set()
        self._in_grading: dict[int, _Record] = {}  # item's index -> its record, without verdict

    def items(self, source: BinaryIO, done: int) -> Iterator[GradingItem]:
        """The rows that have a gold answer, for the graders. Other rows go to the writer.

        The first `done` rows are skipped: an earlier start has written them.
        """
        for number, position, line in read_lines(source):
            if number <= done:
                continue
            if self._progress is not None:
                self._progress(number, position)
            row = parse_row(number, line, self._columns)
            if isinstance(row, RefusedRow):
                self._writer.put(number, {"row": number, "refused": row.reason})
                continue
            record = self._measured(row)
            if row.gold is None:
                self._writer.put(number, record)
                continue
            self._in_grading[self._num_items] = record
            self._num_items += 1
            yield GradingItem(
                row.response,
                row.gold,
                row.answer_format,
                row.opens_thinking,
                stopped=record["finish_reason"] in ("stop", None),
            )

    def finish(self, index: int, verdict: Verdict) -> None:
        """Write the record of a graded row."""
        record = self._in_grading.pop(index)
        record |= {"reward": float(verdict.is_right), "grading_failure": verdict.failure}
        self._writer.put(record["row"], record)

    def _measured(self, row: ScoreRow) -> _Record:
        token_ids, finish, limit = row.token_ids, row.finish_reason, self._max_length
        if token_ids is None and self._encode is not None:
            token_ids = self._encode(row.response)
        length = len(row.response if token_ids is None else token_ids)
        if finish is None and limit is not None:
            finish = "length" if length >= limit else "stop"
        response = measure(row.response, token_ids, self._limits, finish_reason=finish, reward=None)
        if row.group is not None:
            self._groups.add(row.group)
            if len(self._groups) > MAX_GROUPS:
                raise UserError(
                    f"row {row.number}: more than {MAX_GROUPS:,} groups; --group "
                    f"{self._columns.group} names a column with few values"
                )
        return {
            "row": row.number,
            "id": row.row_id,
            "group": row.group,
            "label": row.label,
            **asdict(response),
        }


class _OrderedWriter:
    """Appends records in the order of their rows; holds those that came before their turn."""

    def __init__(self, file: BinaryIO, next_row: int):
        self._file, self._next = file, next_row
        self._early: dict[int, _Record] = {}

    def put(self, row: int, record: _Record) -> None:
        self._early[row] = record
        while self._next in self._early:
            line = json.dumps(self._early.pop(self._next)) + "\n"
            self._file.write(line.encode())
            self._next += 1
        self._file.flush()


def _header(path: Path, settings: ScoreSettings) -> _Record:
    """What a continued run must share with the one that began the file."""
    with path.open("rb") as file:
        digest = xxhash.xxh3_128_hexdigest(file.read(_FIRST_BYTES))
    return {
        "source_bytes": path.stat().st_size,
        "source_hash": digest,
        **{f"column_{role}": name for role, name in asdict(settings.columns).items()},
        **asdict(_limits(settings)),
        "unit": "tokens" if _in_tokens(settings) else "characters",
        "max_length": settings.max_length,
        "tokenizer": settings.tokenizer,
        "timeout_seconds": settings.timeout_seconds,
    }


def _in_tokens(settings: ScoreSettings) -> bool:
    return settings.columns.tokens is not None or settings.tokenizer is not None


def _limits(settings: ScoreSettings) -> CompressionLimits:
    config = MonitoringConfig(
        repetition_tail_characters=settings.tail_characters, repetition_ratio=settings.ratio
    )
    budget = settings.max_length if _in_tokens(settings) else None
    return compression_limits(config, PAPER_TAIL_CHARACTERS if budget is None else budget)


def _encoder(settings: ScoreSettings) -> Callable[[str], list[int]] | None:
    if settings.tokenizer is None:
        return None
    from stable_opd_mcore.data.chat import Tokenizer

    return Tokenizer.load(settings.tokenizer).encode


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{path}: another score command is writing it; wait for its end") from error


def _resume(file: BinaryIO, header: _Record, path: Path) -> int:
    """Drop an incomplete last line, check the header or write it; the number of rows done."""
    file.seek(0)
    num_lines, end, first = 0, 0, b""
    for line in file:
        if not line.endswith(b"\n"):
            break
        first = first or line
        num_lines += 1
        end += len(line)
    file.truncate(end)
    file.seek(end)
    if not num_lines:
        file.write(json.dumps(header).encode() + b"\n")
        return 0
    try:
        earlier = cast("Any", json.loads(first))
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or earlier.keys() != header.keys():
        raise UserError(f"{path}: not written by this command; give another --output")
    for name, value in header.items():
        if earlier[name] != value:
            raise UserError(
                f"{path}: begun with {name} {earlier[name]!r}, now {value!r}; give another "
                "--output, or remove it to score again"
            )
    return num_lines - 1


def _summary(file: BinaryIO, unit: str, max_length: int | None, path: Path) -> ScoreSummary:
    file.seek(0)
    lines = iter(file)
    next(lines)  # the header
    try:
        return summarise((json.loads(line) for line in lines), unit, max_length)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: holds a row that this command did not write ({error!r}); remove the file "
            "and score again"
        ) from error
