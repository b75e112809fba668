"""The records of verdict.py and nodes.py: an attempt, its verdict, and their files.

Standard library only, Python 3.8 or later. Not here: how a verdict is reached.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# Lines in a rank's log that Slurm, rank.sh, a C++ stack or torch's notices at exit wrote.
FOREIGN_LINE = re.compile(
    r"\s*$|(slurmstepd|srun): |.*/rank\.sh: line |\s*frame #|(\[rank\d+\]:)?\[?[WI]\d{4} "
)


@dataclass(frozen=True)
class Attempt:
    """One start of a job, and the limits that hold for its next one."""

    directory: Path  # LOG_DIR/attempt_N
    job: int
    number: int  # 0 for the first start
    stop: str = ""  # signal that the batch script got: "", "USR1" (soon) or "TERM" (Slurm ends it)
    max_requeues: int = 50
    max_hangs: int = 3

    @property
    def history(self) -> Path:
        return self.directory.parent / "verdicts.jsonl"

    def log(self, text: str) -> None:
        """Print a line as common.sh does; the standard output is for what it does next."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        print(f"{now} [attempt {self.number}] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Verdict:
    """What came of an attempt, and what common.sh does next."""

    name: str  # done, stopped, hang, requeued, lost or failed
    reason: str
    action: str = "end"  # or requeue, exclude, probe, start
    nodes: tuple[str, ...] = ()  # the next attempt leaves them out
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None
    faults: tuple[str, ...] = ()  # kinds of preflight faults; a later attempt compares them


def record(attempt: Attempt, verdict: Verdict) -> None:
    """Add the verdict to verdicts.jsonl, and write it to verdict.json."""
    line = {
        "verdict": verdict.name,
        "reason": verdict.reason,
        "queued_again": verdict.action in ("requeue", "exclude"),
        "job": attempt.job,
        "attempt": attempt.number,
        "rank": verdict.rank,
        "node": verdict.node,
        "exit_code": verdict.exit_code,
        "excluded": verdict.nodes,
        "faults": verdict.faults,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_history(attempt, [*read_history(attempt), line])
    attempt.log(f"verdict: {verdict.name}: {verdict.reason}")


def write_history(attempt: Attempt, verdicts: list[dict]) -> None:
    lines = [json.dumps(each) + "\n" for each in verdicts]
    newest = attempt.history.with_name("verdict.json")
    for path, text in ((attempt.history, "".join(lines)), (newest, lines[-1])):
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text)
        partial.replace(path)


def read_history(attempt: Attempt) -> list[dict]:
    return [json.loads(line) for line in read(attempt.history).splitlines()]


def read(path: Path) -> str:
    """Text of a file without the white space around it; "" when the file is absent."""
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def last_line(path: Path) -> str:
    """The last line that the process itself wrote, else the last line of all."""
    lines = [line.strip() for line in read(path).splitlines()]
    own = [line for line in lines if not FOREIGN_LINE.match(line)]
    return ["", *lines, *own][-1]
