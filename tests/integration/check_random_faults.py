"""Disturb training runs at random moments, and compare each with an undisturbed one bit for bit.

    python -m tests.integration.check_random_faults KIND SEED COUNT

    ranks     SIGKILL to one of two ranks, COUNT times in all, and the same command again each time
    disk      COUNT runs whose file system is filled at one of DISK_MOMENTS in turn, and the same
              command again with space

Prints a row for each fault. Not collected by pytest: it takes minutes. `disk` needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.integration.processes import running
from tests.integration.sglang_tools import Process, rows, train, training_command

STEPS = 12
TINY = (
    "rollout.engine=embedded",
    f"train.steps={STEPS}",
    "rollout.prompts_per_step=4",
    "sampling.max_new_tokens=16",
    "checkpoint.every=2",
    "checkpoint.keep=2",
)
MACHINE_KEYS = ("time/", "throughput/", "memory/", "engine/")


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of every step but those of the machine."""
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_KEYS)} for row in rows(run)]


def assert_same(run: Path, undisturbed: Path) -> None:
    assert numbers_of(run) == numbers_of(undisturbed)
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (undisturbed / weights).read_bytes()


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def check_ranks(draw: random.Random, home: Path, count: int) -> None:
    start = time.monotonic()
    undisturbed = train(home, "undisturbed", *TINY, ranks=2)
    whole = time.monotonic() - start
    run, killed, attempt = home / "run", 0, 0
    while killed < count or not (run / "DONE").exists():
        if (run / "DONE").exists():
            assert_same(run, undisturbed)
            shutil.rmtree(run)
        attempt += 1
        command = training_command(home, "run", *TINY, ranks=2)
        with Process(command, home / f"{attempt}.output") as process:
            end = time.monotonic() + draw.uniform(0.2, 0.9) * whole
            while killed < count and process.running and time.monotonic() < end:
                time.sleep(0.02)
            ranks = ranks_of(home) if killed < count else []
            if process.running and ranks:
                rank, pid = draw.choice(ranks)
                done = len(rows(run))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                    print(f"kill {killed}: rank {rank} after step {done}", flush=True)
                assert process.wait() != 0 or (run / "DONE").exists(), process.text[-2000:]
            elif killed >= count:
                assert process.wait() == 0, process.text[-2000:]
    assert_same(run, undisturbed)
    print(f"{killed} kills, {attempt} starts: metrics and weights equal bit for bit")


def ranks_of(home: Path) -> list[tuple[int, int]]:
    """(rank, pid) of the trainers of the disturbed run."""
    return [
        (int(environment["RANK"]), pid)
        for pid, command, environment in running()
        if "RANK" in environment and {f"run.directory={home}", "run.name=run"} <= {*command}
    ]


@contextlib.contextmanager
def small_file_system(home: Path) -> Iterator[Path]:
    place = home / "small"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def checkpoints_of(run: Path, name: str) -> list[Path]:
    return list((run / "checkpoints").glob(name))


DISK_MOMENTS: dict[str, Callable[[Path], object]] = {
    "before the first step": lambda run: run.exists(),
    "after the first step": rows,
    "while the first checkpoint is written": lambda run: checkpoints_of(run, "partial-*"),
    "after the first checkpoint": lambda run: checkpoints_of(run, "step_*"),
    "while a later checkpoint is written": lambda run: (
        checkpoints_of(run, "step_*") and checkpoints_of(run, "partial-*")
    ),
    "while the model is exported": lambda run: (run / ".model.new").exists(),
}


def check_disk(draw: random.Random, home: Path, count: int) -> None:
    undisturbed = train(home, "undisturbed", *TINY)
    for number, (moment, reached) in zip(range(count), cycle(DISK_MOMENTS.items()), strict=False):
        with small_file_system(home) as place:
            command = training_command(place, "run", *TINY)
            run = place / "run"
            with Process(command, home / f"disk_{number}.output") as process:
                while process.running and not reached(run):
                    time.sleep(0.0005)
                left, done = draw.choice((0, 4096, 300_000)), len(rows(run))
                free = shutil.disk_usage(place).free
                with contextlib.suppress(OSError):
                    (place / "filler").write_bytes(bytes(max(0, free - left)))
                code = process.wait()
            kept = [path.name for path in checkpoints_of(run, "step_*")]
            print(f"full {moment}: step {done}, {left} bytes left: exit code {code}; kept: {kept}")
            print(f"    {last_line(process.text)}", flush=True)
            assert code in (0, 2), process.text[-3000:]
            assert "Traceback" not in process.text, process.text[-3000:]
            (place / "filler").unlink()
            assert_same(train(place, "run", *TINY), undisturbed)
            print("    resumed with equal metrics and weights", flush=True)


CHECKS = {
    "ranks": check_ranks,
    "disk": check_disk,
}

if __name__ == "__main__":
    kind, seed, amount = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as directory:
        CHECKS[kind](random.Random(seed), Path(directory), amount)
