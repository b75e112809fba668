"""`stable-opd score`: grade and measure files of generations, with the code of a run.

Rows stream through grading workers; one verdict per row is appended to a file, in the order of the
rows. The summary is computed from that file alone, so a run that was killed and started again gives
what an uninterrupted one gives. Memory does not grow with the files. Not here: reading rows
(score_rows.py), the numbers (data/responses.py).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    RowError,
    ScoreRow,
    find_columns,
    parse_row,
    read_lines,
)
from stable_opd_mcore.evaluation.score_summary import summarise
from stable_opd_mcore.host.atomic_files import describe_space, write_atomically

MAX_GROUPS = 1000
STANDARD_INPUT = Path("-")
_FIRST_BYTES = 2**20  # of a source, whose hash tells another file
_Record = dict[str, Any]


@dataclass(frozen=True)
class ScoreSettings:
    """How to score files."""

    columns: Columns = field(default_factory=Columns)  # None where the usual names are looked for
    tokenizer: str | None = None  # model directory; makes the token ids of rows that have none
    max_length: int | None = None  # length budget, in tokens, or in characters without tokens
    tail_characters: int | None = None  # None: as in a run with this budget, at most 10,000
    ratio: float = 10.0
    timeout_seconds: float = 10.0
    workers: int | None = None  # None: one for each core

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise UserError(f"--ratio {self.ratio}: expected a number above 0; 10 is the paper's")

    @property
    def unit(self) -> str:
        """Of lengths."""
        has_tokens = self.columns.tokens is not None or self.tokenizer is not None
        return "tokens" if has_tokens else "characters"


def default_output(paths: Sequence[Path]) -> Path:
    """`FILE.score`, or stdin.score.

    Raises:
        UserError: several files.
    """
    if len(paths) > 1:
        raise UserError(f"{len(paths)} files: say with --output DIR where their verdicts go")
    name = "stdin" if paths[0] == STANDARD_INPUT else paths[0].name
    return paths[0].with_name(f"{name}.score")


def score_files(
    paths: Sequence[Path],
    output: Path,
    settings: ScoreSettings,
    progress: Callable[[int, float], None] = lambda *_: None,
) -> _Record:
    """Score the rows of `paths`; write `output`/verdicts.jsonl and `output`/summary.json.

    Continues where an earlier call was interrupted. Of several files each is a group, unless the
    settings name a column of groups.

    Args:
        paths: files of JSON Lines with the same columns; STANDARD_INPUT reads that.
        progress: called with the number of rows read and the share of the bytes.

    Raises:
        UserError: no such file, no column for the response, more than 1,000 groups, an `output`
            of other files, of other settings, or in use, or no room there.

    Returns:
        What summary.json holds: `settings`, and the numbers of `summarise`.
    """
    with ExitStack() as stack:
        sources = [_open(path, stack) for path in paths]
        first = sources[0]
        columns = find_columns(first.file, first.name, settings.columns)
        settings = replace(settings, columns=columns)
        output.mkdir(parents=True, exist_ok=True)
        try:
            return _score(sources, output, settings, progress)
        except OSError as error:
            if error.filename is not None:
                raise
            raise UserError(
                f"{output}: cannot be written: {error.strerror}; {describe_space(output, 0)}. Make "
                "room; the same command goes on where it stopped"
            ) from error


@contextmanager
def shown_progress() -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal's standard error, for `score_files`."""
    columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("0 rows", total=1.0)
        yield lambda rows, share: bar.update(task, completed=share, description=f"{rows:,} rows")


@dataclass(frozen=True)
class _Source:
    name: str
    file: BinaryIO
    num_bytes: int


def _open(path: Path, stack: ExitStack) -> _Source:
    """The file; standard input is copied to a temporary one, which the settings' hash needs."""
    if path == STANDARD_INPUT:
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        shutil.copyfileobj(sys.stdin.buffer, file)
        num_bytes = file.tell()
        file.seek(0)
        return _Source("standard input", file, num_bytes)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {found}; give a file of JSON Lines, or - for standard input")
    return _Source(str(path), stack.enter_context(path.open("rb")), path.stat().st_size)


def _score(
    sources: Sequence[_Source],
    output: Path,
    settings: ScoreSettings,
    progress: Callable[[int, float], None],
) -> _Record:
    plain = _plain(sources, settings)
    verdicts, numbers = output / "verdicts.jsonl", output / "summary.json"
    with verdicts.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{verdicts}: another score command is writing it; wait for its end"
            ) from None
        done = _resume(file, verdicts, numbers, plain)
        scorer = _Scorer(settings, file, done, progress)
        workers = settings.workers or len(os.sched_getaffinity(0))
        with Grader(settings.timeout_seconds, workers) as grader:
            for index, verdict in grader.grade_stream(scorer.items(sources)):
                scorer.finish(index, verdict)
        file.seek(0)
        try:
            found = summarise(map(json.loads, file), settings.unit, settings.max_length)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{verdicts}: holds a row that this command did not write ({error!r}); remove the "
                "file and score again"
            ) from error
    summary = {"settings": plain, **found}
    _write_summary(numbers, summary)
    return summary


class _Scorer:
    """Gives rows to the grader; writes their records in the order of the rows.

    Holds the rows that are being graded, and those that were graded before their turn.
    """

    def __init__(
        self,
        settings: ScoreSettings,
        file: BinaryIO,
        done: int,
        progress: Callable[[int, float], None],
    ):
        """done: rows that an earlier start has written to `file`."""
        self._settings, self._file, self._done = settings, file, done
        self._progress = progress
        self._limits = _limits(settings)
        self._encode = _encoder(settings)
        self._groups: set[str] = set()
        self._num_items = 0
        self._in_grading: dict[int, tuple[int, _Record]] = {}  # item -> number and record
        self._graded: dict[int, _Record] = {}  # number of the row -> its record

    def items(self, sources: Sequence[_Source]) -> Iterator[GradingItem]:
        """The rows that have a gold answer, for the graders. Other rows are written."""
        total, number, position = sum(source.num_bytes for source in sources), 0, 0
        for source in sources:
            source.file.seek(0)
            group = source.name if len(sources) > 1 else None
            for row, (size, line) in enumerate(read_lines(source.file), start=1):
                number += 1
                position += size
                if number <= self._done:
                    continue
                self._progress(number, position / total)
                place = {"row": row} if group is None else {"file": group, "row": row}
                try:
                    parsed = parse_row(line, self._settings.columns)
                except RowError as error:
                    self._put(number, place | {"refused": str(error)})
                    continue
                record = place | self._measured(parsed, group, f"row {row}")
                if parsed.gold is None:
                    self._put(number, record)
                else:
                    self._in_grading[self._num_items] = number, record
                    self._num_items += 1
                    yield GradingItem(
                        parsed.response,
                        parsed.gold,
                        parsed.answer_format,
                        parsed.opens_thinking,
                        stopped=record["finish_reason"] in ("stop", None),
                    )

    def finish(self, index: int, verdict: Verdict) -> None:
        """Write the record of a graded row."""
        number, record = self._in_grading.pop(index)
        truncated_loop = record["finish_reason"] == "length" and record["loop"]["length"] > 0
        record["reward"], record["grading_failure"] = float(verdict.is_right), verdict.failure
        record["right_in_loop"] = verdict.is_right and truncated_loop
        self._put(number, record)

    def _put(self, number: int, record: _Record) -> None:
        self._graded[number] = record
        while (ready := self._graded.pop(self._done + 1, None)) is not None:
            self._file.write(json.dumps(ready).encode() + b"\n")
            self._done += 1
        self._file.flush()

    def _measured(self, row: ScoreRow, file: str | None, place: str) -> _Record:
        token_ids, finish, limit = row.tokens, row.finish, self._settings.max_length
        if token_ids is None and self._encode is not None:
            token_ids = self._encode(row.response)
        length = len(row.response if token_ids is None else token_ids)
        if finish is None and limit is not None:
            finish = "length" if length >= limit else "stop"
        response = measure(row.response, token_ids, self._limits, finish_reason=finish, reward=None)
        column = self._settings.columns.group
        group = file if column is None else row.group
        if group is not None:
            self._groups.add(group)
        if len(self._groups) > MAX_GROUPS:
            raise UserError(
                f"{place}: more than {MAX_GROUPS:,} groups; --group {column} names a column with "
                "few values"
            )
        named = {"id": row.id, "group": group, "label": row.label, "right_in_loop": False}
        return named | asdict(response)


def _plain(sources: Sequence[_Source], settings: ScoreSettings) -> _Record:
    """What a continued call must share with the one that began."""
    files = []
    for source in sources:
        source.file.seek(0)
        digest = xxhash.xxh3_128_hexdigest(source.file.read(_FIRST_BYTES))
        files.append({"name": source.name, "bytes": source.num_bytes, "hash": digest})
    return {
        "files": files,
        **{f"column_{role}": name for role, name in asdict(settings.columns).items()},
        **asdict(_limits(settings)),
        "unit": settings.unit,
        "max_length": settings.max_length,
        "tokenizer": settings.tokenizer,
        "timeout_seconds": settings.timeout_seconds,
    }


def _limits(settings: ScoreSettings) -> CompressionLimits:
    config = MonitoringConfig(
        repetition_tail_characters=settings.tail_characters, repetition_ratio=settings.ratio
    )
    budget = settings.max_length if settings.unit == "tokens" else None
    return compression_limits(config, PAPER_TAIL_CHARACTERS if budget is None else budget)


def _encoder(settings: ScoreSettings) -> Callable[[str], list[int]] | None:
    if settings.tokenizer is None:
        return None
    from stable_opd_mcore.data.chat import Tokenizer

    return Tokenizer.load(settings.tokenizer).encode


def _resume(file: BinaryIO, verdicts: Path, numbers: Path, settings: _Record) -> int:
    """Drop an incomplete last line and check the settings, or write them; the rows done.

    Raises:
        UserError: verdicts without settings, or of others.
    """
    num_rows = end = 0
    file.seek(0)
    for line in file:
        if line.endswith(b"\n"):
            num_rows, end = num_rows + 1, end + len(line)
    if not numbers.is_file() and not end:
        _write_summary(numbers, {"settings": settings})
    try:
        earlier = cast("Any", json.loads(numbers.read_bytes()))["settings"]
        different = [name for name in settings if earlier[name] != settings[name]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{verdicts}: there is no {numbers.name} of this command beside it; give another "
            "--output"
        ) from None
    if different:
        name = different[0]
        raise UserError(
            f"{verdicts}: begun with {name} {earlier[name]!r}, now {settings[name]!r}; give "
            "another --output, or remove that directory to score again"
        )
    file.truncate(end)
    return num_rows


def _write_summary(path: Path, values: _Record) -> None:
    write_atomically(path, (json.dumps(values, indent=1) + "\n").encode())
