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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stable_opd_mcore.records import AnswerFormat, GradingFailure, Rollout

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


@dataclass(frozen=True)
class Verdict:
    """Whether a response is right; with a failure it counts as wrong."""

    is_right: bool
    failure: GradingFailure | None = None  # over its time, or the worker ended (memory, recursion)


class Grader:
    """Grades items in worker processes, which start with the first item that needs one.

    Verdicts depend on time limits. Ranks that need equal verdicts must take those of one rank.
    """

    def __init__(self, timeout_seconds: float = 10.0, workers: int = 2):
        assert timeout_seconds > 0 and workers > 0
        self.timeout_seconds = timeout_seconds
        self._max_workers = workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; the next items start new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def grade(self, items: Sequence[GradingItem]) -> list[Verdict]:
        """Verdicts in the order of the items; see `grade_stream`."""
        verdicts = dict(self.grade_stream(items))
        return [verdicts[index] for index in range(len(items))]

    def grade_stream(self, items: Iterable[GradingItem]) -> Iterator[tuple[int, Verdict]]:
        """(index of the item, its verdict) as verdicts come; takes items as workers get free.

        "bracket": right if the response stopped directly after "[gold]". "boxed": math-verify
        decides on the text after </think>; a response that never closes its <think> is wrong.

        Raises:
            RuntimeError: a worker cannot start; the message holds its standard error.
        """
        numbered = enumerate(items)
        waiting: deque[tuple[int, str, str]] = deque()
        try:
            while True:
                while len(waiting) < self._max_workers:
                    index, item = next(numbered, (None, None))
                    if index is None or item is None:
                        break
                    if item.answer_format == "bracket":
                        bracket = item.stopped and item.response.endswith(f"[{item.gold}]")
                        yield index, Verdict(bracket)
                    elif (answer := _after_thought(item)) is None:
                        yield index, Verdict(False)
                    else:
                        waiting.append((index, answer, item.gold))
                if not waiting and not any(worker.busy for worker in self._workers):
                    return
                yield from self._advance(waiting)
        finally:  # the caller may have stopped asking
            for worker in [w for w in self._workers if w.busy]:
                worker.kill()
                self._workers.remove(worker)

    def grade_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with reward 1.0 or 0.0; those without a gold answer keep None."""
        graded = [rollout for rollout in rollouts if rollout.prompt.answer is not None]
        verdicts = iter(self.grade([grading_item(rollout) for rollout in graded]))
        return [
            rollout if rollout.prompt.answer is None else _with_verdict(rollout, next(verdicts))
            for rollout in rollouts
        ]

    def _advance(self, waiting: deque[tuple[int, str, str]]) -> list[tuple[int, Verdict]]:
        """Send items to idle workers and wait for one to answer, to end or to run over its time.

        Workers that end or overrun are replaced.
        """
        self._start_workers(len(waiting))
        for worker in self._workers:
            if waiting and worker.idle:
                worker.send(*waiting.popleft(), self.timeout_seconds)
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            deadline = min(worker.deadline for worker in self._workers)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        verdicts: list[tuple[int, Verdict]] = []
        for key, _ in ready:
            verdicts += self._collect(key.data)
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            if worker.item is not None:
                verdicts.append((worker.item, Verdict(False, "timeout")))
            self._remove(worker, f"did not start within {_START_SECONDS:.0f} s")
        return verdicts

    def _collect(self, worker: _Worker) -> list[tuple[int, Verdict]]:
        """The verdict that a worker has written, if its line is complete."""
        line, item = worker.read(), worker.item
        if line is None:
            self._remove(worker, "ended before it was ready")
            return [] if item is None else [(item, Verdict(False, "crash"))]
        if item is None or not line:
            return []
        worker.become_idle()
        return [(item, Verdict(json.loads(line)))]

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
        busy = sum(worker.busy for worker in self._workers)
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
    def busy(self) -> bool:
        return self.item is not None

    @property
    def idle(self) -> bool:
        return self.started and self.item is None

    def send(self, index: int, response: str, gold: str, timeout_seconds: float) -> None:
        self.item = index
        self.deadline = time.monotonic() + timeout_seconds
        # json.dumps escapes a lone surrogate, which byte-level decoding may leave.
        # The pipe is broken if the worker ended while it was idle; `read` tells.
        with contextlib.suppress(BrokenPipeError):
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


def _with_verdict(rollout: Rollout, verdict: Verdict) -> Rollout:
    return replace(rollout, reward=float(verdict.is_right), grading_failure=verdict.failure)


def _after_thought(item: GradingItem) -> str | None:
    """The text after the last </think>; None if <think> was opened and never closed."""
    _, end, answer = item.response.rpartition(_THINK_END)
    if end:
        return answer
    opened = item.opens_thinking or item.response.lstrip().startswith("<think>")
    return None if opened else item.response
