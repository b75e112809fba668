"""Seconds of `stable-opd score` for 10,000 responses, made from a smaller file of real ones.

    python -m benchmarks.score GENERATIONS.jsonl [--rows 10000] [--changed] [--output DIR]
    python -m benchmarks.score --smoke   # four rows of its own: does it run?

The rows of the file are repeated. With --changed each copy exchanges the digits of its numbers of
two and more digits, in responses and gold answers alike, so that no two copies have the same
formulas and no cache helps. Needs columns that `score` finds, with `response` and `gold`. Prints
wall-clock and processor seconds, all processes together. Not here: the verdicts' correctness.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DIGITS = "123456789"
NUMBER = re.compile(r"\d{2,}")
SMOKE_ROWS = (
    {"problem": "7 * 6", "response": "It is \\boxed{42}.", "gold": "42"},
    {"problem": "7 + 6", "response": "It is \\boxed{12}.", "gold": "13"},
)


def write_rows(source: Path, rows: int, changed: bool, output: Path) -> None:
    """Write `rows` rows of `source`, over and over."""
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    with output.open("w", encoding="utf-8") as file:
        for row in range(rows):
            copy, place = divmod(row, len(records))
            record = dict(records[place])
            if changed and copy:
                for column in ("response", "gold"):
                    record[column] = exchanged(record[column], copy)
            file.write(json.dumps(record) + "\n")


def exchanged(text: str, copy: int) -> str:
    """The text with other digits in numbers of two and more digits; zeros stay."""
    digits = list(DIGITS)
    random.Random(copy).shuffle(digits)
    table = str.maketrans(DIGITS, "".join(digits))
    return NUMBER.sub(lambda number: number[0].translate(table), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("source", type=Path, nargs="?")
    source.add_argument("--smoke", action="store_true", help="score four rows")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.smoke:
        args.rows, args.changed, args.source = 4, True, args.output / "source.jsonl"
        args.source.write_text("".join(json.dumps(row) + "\n" for row in SMOKE_ROWS))
    path = args.output / "rows.jsonl"
    write_rows(args.source, args.rows, args.changed, path)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "stable_opd_mcore", "score", str(path)], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{args.rows:,} rows: {time.monotonic() - began:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of processor time, {cores} cores, "
        f"load average before {load:.1f}"
    )


if __name__ == "__main__":
    main()
