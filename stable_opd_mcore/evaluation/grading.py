"""Grade final answers: with math-verify in worker processes, or by an exact "[answer]" at the end.

math-verify passes model output to sympy, which may run for hours or use all memory. So it runs in
subprocesses that can be killed: an item that exceeds its time counts as wrong, and its worker is
replaced. A worker runs one file (grading_worker.py) and is no fork of a process that holds a device
and process groups. Not here: the extraction of an answer from a response, which is math-verify's.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stable_opd_mcore.metrics import Metrics, Sum
from stable_opd_mcore.records import AnswerFormat, Rollout

_WORKER_FILE = Path(__file__).with_name("grading_worker.py")
_START_SECONDS = 120.0  # importing sympy on a busy machine
_THINK_END = "</think>"


@dataclass(frozen=True)
class GradingItem:
    """One response and its gold answer."""

    response: str  # without its stop token
    gold: str
    answer_format: AnswerFormat = "boxed"
    opens_thinking: bool = False  # the prompt ended inside <think>
    stopped: bool = True  # the response ended with a stop token


def grading_item(rollout: Rollout) -> GradingItem:
    """The item of a rollout whose prompt has a gold answer."""
    prompt = rollout.prompt
    if prompt.answer is None:
        raise ValueError(f"{prompt.prompt_id}: no gold answer to grade against")
    return GradingItem(
        response=rollout.text,
        gold=prompt.answer,
        answer_format=prompt.answer_format,
        opens_thinking=prompt.opens_thinking,
        stopped=rollout.finish_reason == "stop",
    )


class Grader:
    """Grades lists of items. Workers start with the first item that needs one, end with `close`.

    Verdicts depend on time limits. Ranks that need equal verdicts must take those of one rank.
    """

    def __init__(self, timeout_seconds: float = 10.0, workers: int = 2):
        assert timeout_seconds > 0 and workers > 0
        self.timeout_seconds = timeout_seconds
        # Items since the last `take_metrics`: all, those over time, those that ended their worker
        # in another way (memory, recursion).
        self.num_graded = self.num_timed_out = self.num_crashed = 0
        self._max_workers = workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; the next `grade` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def grade(self, items: Sequence[GradingItem]) -> list[bool]:
        """Verdicts in the order of the items.

        "bracket": right if the response stopped directly after "[gold]". "boxed": math-verify
        decides on the text after </think>; a response that never closes its <think> is wrong.

        Raises:
            RuntimeError: a worker cannot start; the message holds its standard error.
        """
        self.num_graded += len(items)
        verdicts = [False] * len(items)
        waiting: deque[tuple[int, str, str]] = deque()
        for index, item in enumerate(items):
            if item.answer_format == "bracket":
                verdicts[index] = item.stopped and item.response.endswith(f"[{item.gold}]")
            else:
                answer = _after_thought(item)
                if answer is not None:
                    waiting.append((index, answer, item.gold))
        self._run(waiting, verdicts)
        return verdicts

    def grade_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with reward 1.0 or 0.0; those without a gold answer keep None."""
        graded = [rollout for rollout in rollouts if rollout.prompt.answer is not None]
        verdicts = iter(self.grade([grading_item(rollout) for rollout in graded]))
        return [
            rollout
            if rollout.prompt.answer is None
            else replace(rollout, reward=float(next(verdicts)))
            for rollout in rollouts
        ]

    def take_metrics(self, area: str) -> Metrics:
        """`<area>/grading_timeouts` and `<area>/grading_crashes` since the last call.

        Empty if nothing was graded. Each rank counts its own items: reduce over ranks.
        """
        counts = {"timeouts": self.num_timed_out, "crashes": self.num_crashed}
        graded = self.num_graded
        self.num_graded = self.num_timed_out = self.num_crashed = 0
        return Metrics(
            {f"{area}/grading_{k}": Sum(float(n)) for k, n in counts.items()} if graded else {}
        )

    def _run(self, waiting: deque[tuple[int, str, str]], verdicts: list[bool]) -> None:
        """Send items to idle workers, collect verdicts, replace workers that end or overrun."""
        self._start_workers(len(waiting))
        while waiting or any(worker.item is not None for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.idle:
                    worker.send(*waiting.popleft(), self.timeout_seconds)
            with selectors.DefaultSelector() as selector:
                for worker in self._workers:
                    selector.register(worker.answers, selectors.EVENT_READ, worker)
                deadline = min(worker.deadline for worker in self._workers)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                self._collect(key.data, verdicts)
            now = time.monotonic()
            for worker in [w for w in self._workers if w.deadline <= now]:
                self.num_timed_out += 1
                self._remove(worker, f"did not start within {_START_SECONDS:.0f} s")
            self._start_workers(len(waiting))

    def _collect(self, worker: _Worker, verdicts: list[bool]) -> None:
        line = worker.read()
        if line is None:
            self.num_crashed += worker.item is not None
            self._remove(worker, "ended before it was ready")
        elif worker.item is not None and line:
            verdicts[worker.item] = json.loads(line)
            worker.become_idle()

    def _remove(self, worker: _Worker, start_failure: str) -> None:
        """Kill a worker and forget it; a worker that never started is an error."""
        worker.kill()
        self._workers.remove(worker)
        if not worker.started:
            raise RuntimeError(
                f"a grading worker {start_failure} (is math-verify installed?): "
                f"{worker.standard_error()}"
            )

    def _start_workers(self, num_waiting: int) -> None:
        busy = sum(worker.item is not None for worker in self._workers)
        for _ in range(min(self._max_workers, busy + num_waiting) - len(self._workers)):
            self._workers.append(_Worker(2 * self.timeout_seconds + 10))


class _Worker:
    """One subprocess with at most one item and a deadline, for its start or for the item."""

    def __init__(self, orphan_seconds: float):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the worker)
        # -P: this folder is not on its import path. A session of its own: Ctrl-C does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER_FILE), str(orphan_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._items, self.answers = self._process.stdin, self._process.stdout
        self._buffer = b""
        self.started = False
        self.item: int | None = None  # index of its item
        self.deadline = time.monotonic() + _START_SECONDS

    @property
    def idle(self) -> bool:
        return self.started and self.item is None

    def send(self, index: int, response: str, gold: str, timeout_seconds: float) -> None:
        self.item = index
        self.deadline = time.monotonic() + timeout_seconds
        # json.dumps escapes a lone surrogate, which byte-level decoding may leave.
        self._items.write(json.dumps([response, gold]).encode() + b"\n")
        self._items.flush()

    def read(self) -> str | None:
        """One complete line, "" while there is none, None when the process has ended."""
        data = os.read(self.answers.fileno(), 4096)
        if not data:
            return None
        self._buffer += data
        if not self._buffer.endswith(b"\n"):
            return ""
        line, self._buffer = self._buffer.decode().strip(), b""
        if not self.started:
            self.become_idle()
            self.started = True
            return ""
        return line

    def become_idle(self) -> None:
        self.item = None
        self.deadline = float("inf")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.answers.close()
        # The pipe is broken if it ended while an item was being sent.
        with contextlib.suppress(BrokenPipeError):
            self._items.close()

    def standard_error(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-2000:] or "(no output)"


def _after_thought(item: GradingItem) -> str | None:
    """The text after the last </think>; None if <think> was opened and never closed."""
    _, end, answer = item.response.rpartition(_THINK_END)
    if end:
        return answer
    opened = item.opens_thinking or item.response.lstrip().startswith("<think>")
    return None if opened else item.response
