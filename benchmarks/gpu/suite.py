"""The parts of the suite, and how one is run: a process of its own with its own time limit.

A part that fails, crashes, hangs or takes too much memory does not stop the next one. The limits
add up to two passes of six minutes. Not here: what a part measures (parts/), what a failure means
(advice.py), the tables (report.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.gpu.record import SKIPPED, Entry, read_entries
from stable_opd_mcore.serving import timeouts

FIRST_RUN = 3  # times a part's limit until it has once ended in time: nothing is cached, and no GPU
# has calibrated the limits
CPU_PATIENCE = 4  # times a part's limit on a CPU, whose times mean nothing
ROOT = Path(__file__).parents[2]

Status = Literal["ok", "failed", "skipped", "out of time"]


@dataclass(frozen=True)
class Part:
    name: str  # the module in parts/
    limit_seconds: float
    title: str
    start_seconds: float = 0.0  # more, in which its SGLang servers compile kernels
    gates: bool = False  # a failure means: do not train; of other parts it only informs


PARTS = (  # the first pass of six minutes ends with `publish`
    Part("environment", 55, "versions, and the machine's own rates", gates=True),
    Part("attention", 70, "Transformer Engine's attention over 32k packed tokens against torch's"),
    Part("kernels", 85, "loss kernels against their definitions"),
    Part("layers", 60, "Transformer Engine's layers against torch's", gates=True),
    Part("step", 40, "one Stable-OPD step against the CPU's on the same rollouts", gates=True),
    Part("publish", 30, "weights to another process by CUDA IPC and NCCL", gates=True),
    Part(
        "servers",
        110,
        "colocated SGLang servers: memory handed over, weights published",
        start_seconds=timeouts.START,
        gates=True,
    ),
    Part("memory", 35, "peak memory against `stable-opd plan`"),
    Part("utilisation", 70, "a 1.5B- and a 7B-shaped step"),
    Part("resume", 65, "a killed run resumes with the same metrics"),
    Part("loss", 50, "the loss's speed and memory against its products, torch and Liger"),
    Part("fp8", 30, "FP8: the emulation against Transformer Engine's; a 7B-shaped forward pass"),
)


@dataclass(frozen=True)
class PartResult:
    """How one part ended, and what it wrote down."""

    name: str
    status: Status
    seconds: float
    reason: str  # why the part is not ok; "" if it is
    entries: tuple[Entry, ...]
    ended: str = ""  # date and time, local


def run_part(
    part: Part,
    folder: Path,
    device: str,
    sglang_python: str,
    command: Sequence[str] | None = None,
    *,
    is_first: bool = False,
) -> PartResult:
    """Run one part to its end or its limit; its output goes to `<folder>/<name>.log`.

    Args:
        command: in place of the part's own, to which the arguments are appended.
        is_first: it has not ended in time on this machine yet.
    """
    record, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    shutil.rmtree(record.with_suffix(""), ignore_errors=True)
    command = command or [sys.executable, "-m", "benchmarks.gpu.part"]
    patience = CPU_PATIENCE if device == "cpu" else FIRST_RUN if is_first else 1
    limit = part.limit_seconds * patience + part.start_seconds
    began, code = time.monotonic(), None
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, part.name, str(record), device, sglang_python],
            cwd=ROOT,
            env=_environment(device),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one group, so that processes the part started end with it
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            _end_all(process)
    seconds = time.monotonic() - began
    entries = tuple(read_entries(record))
    status, reason = _outcome(code, limit, entries, log)
    ended = datetime.now().isoformat(sep=" ", timespec="minutes")
    return PartResult(part.name, status, seconds, reason, entries, ended)


def _environment(device: str) -> dict[str, str]:
    """Variables of every part: this checkout first; on a CPU no GPU and Triton's interpreter."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    values = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if device == "cpu":
        values |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return os.environ | values


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End the part, what it started, and what is left of its group.

    Rollout servers and grading workers have groups of their own; they are found while their parent
    lives.
    """
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _outcome(
    code: int | None, limit: float, entries: Sequence[Entry], log: Path
) -> tuple[Status, str]:
    if code is None:
        return "out of time", f"ended at its limit of {limit:g} s"
    if code == SKIPPED:
        return "skipped", _last_line(log)
    if code < 0:
        return "failed", f"ended by {signal.Signals(-code).name}: {_last_line(log)}"
    if code:
        return "failed", _last_line(log)
    exceeded = [entry for entry in entries if not entry.passes]
    if exceeded:
        first = exceeded[0]
        more = f" and {len(exceeded) - 1} more" if exceeded[1:] else ""
        return "failed", f"{first.name}: {first.value:.3g} > {first.limit:.3g}{more}"
    return "ok", ""


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "no output"
