"""Small preparations of synthetic shards."""

from pathlib import Path
from typing import Any

from stable_opd_mcore.preparation.options import Preparation, preparation_of
from tests.preparation.make_openr1 import make_rows, write_benchmarks, write_shards
from tests.preparation.tokenizers import word_tokenizer

NUM_ROWS = 260


def make_inputs(folder: Path) -> list[str]:
    """Shards, benchmarks and a student in a folder; the reasons of the rows."""
    rows, reasons = make_rows(NUM_ROWS)
    write_shards(folder / "openr1", rows, shards=3, group=25)
    write_benchmarks(folder / "benchmarks")
    word_tokenizer(folder / "student")
    return reasons


def small_preparation(inputs: Path, directory: Path, **changes: Any) -> Preparation:
    options: dict[str, Any] = {
        "student": str(inputs / "student"),
        "student_revision": None,
        "recipe": "openr1",
        "source": str(inputs / "openr1"),
        "directory": directory,
        "benchmarks": inputs / "benchmarks",
        "revision": None,
        "sft_rows": 100,
        "max_tokens": 60,
        "seed": 0,
        "columns": {},
    }
    return preparation_of(**options | changes)
