"""Write the paper's data to files with the names that configs/ use.

openr1_sft_33k.jsonl and openr1_opd_13k.jsonl hold the usable rows of OpenR1-Math-220k, <name>.jsonl
each of the six benchmarks. Not here: the selection of rows (data/openr1.py) and reading the hub
(data/sources.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.progress import track

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.openr1 import select_rows, split_rows
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.sources import read_records
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark

SFT_ROWS = 33_000


def write_paper_data(
    tokenizer: Tokenizer,
    directory: Path,
    tell: Callable[[str], None],
    openr1: str,
    benchmark_directory: Path | None = None,
    sft_rows: int = SFT_ROWS,
) -> None:
    """Write all eight files atomically; files of the same name are replaced.

    Args:
        tokenizer: the student's; solutions of more than 8192 of its tokens are not used.
        openr1: hub id, directory or file with OpenR1-Math-220k's columns.
        benchmark_directory: holds <name>.jsonl or .parquet; None reads the hub.
        sft_rows: rows of the supervised part; the others are the prompts of the distillation.

    Raises:
        DataError: a source cannot be read, lacks a column or has too few rows.
    """
    records = read_records(SourceConfig(path=openr1))
    selection = select_rows(
        track(records, "OpenR1", total=None),
        lambda text: len(tokenizer.encode(text)),
        name=openr1,
    )
    for reason, count in selection.dropped.items():
        tell(f"{openr1}: {count} rows dropped: {reason}")
    sft, opd = split_rows(selection.rows, sft_rows, seed=0)
    files = {"openr1_sft_33k": sft, "openr1_opd_13k": opd}
    files |= {name: load_benchmark(name, benchmark_directory) for name in BENCHMARKS}
    for name, rows in files.items():
        tell(f"{len(rows)} rows: {_write(directory / f'{name}.jsonl', rows)}")


def _write(path: Path, rows: Iterable[Row]) -> Path:
    lines = []
    for row in rows:
        values = {"problem": row.problem, "answer": row.answer, "solution": row.solution}
        given = {name: value for name, value in values.items() if value is not None}
        lines.append(json.dumps(given, ensure_ascii=False) + "\n")
    write_atomically(path, "".join(lines).encode())
    return path
