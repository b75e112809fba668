"""Right or wrong: final answers judged by math-verify in worker processes, or exactly, by bracket.

math-verify hands model output to sympy, which may run for hours or eat all memory, so it runs in
processes that can be killed: an item that exceeds its time is wrong and counted, and its worker is
replaced. Workers are plain subprocesses of one file (grading_worker.py), not forks of a process
that holds a device and process groups. Not an extraction of our own: what counts as the answer of a
response is math-verify's decision, apart from an unfinished thought, which has none.
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

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import AnswerFormat, Rollout

_WORKER_FILE = Path(__file__).with_name("grading_worker.py")
_START_SECONDS = 120.0  # importing sympy on a busy machine
_THINK_END = "</think>"


@dataclass(frozen=True)
class GradingItem:
    """One response and what it should have said."""

    response: str  # without its stop token
    gold: str
    answer_format: AnswerFormat = "boxed"
    opens_thinking: bool = False  # the prompt ended inside <think>
    stopped: bool = True  # the response ended by itself, not by its length


def grading_item(rollout: Rollout) -> GradingItem:
    """A rollout as it is graded.

    Raises:
        UserError: its prompt has no gold answer.
    """
    prompt = rollout.prompt
    if prompt.answer is None:
        raise UserError(
            f"{prompt.prompt_id}: no gold answer to grade against; set data.*.columns.answer"
        )
    return GradingItem(
        response=rollout.text,
        gold=prompt.answer,
        answer_format=prompt.answer_format,
        opens_thinking=prompt.opens_thinking,
        stopped=rollout.finish_reason == "stop",
    )


class Grader:
    """Grades lists of items; workers start with the first that needs them and end with `close`.

    Verdicts depend on time limits, so ranks that must agree share one rank's verdicts.
    """

    def __init__(self, timeout_seconds: float = 10.0, workers: int = 2):
        if timeout_seconds <= 0 or workers < 1:
            raise UserError(
                f"timeout_seconds={timeout_seconds} and workers={workers} must be positive"
            )
        self.timeout_seconds = timeout_seconds
        self.num_timed_out = 0  # items that ran out of time, since the start
        self.num_crashed = 0  # items that killed their worker otherwise (memory, recursion)
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

        "bracket": the response stopped by itself right after "[gold]". "boxed": math-verify, on
        what follows the thought; a thought that the prompt opened and the response never closed
        has no answer.

        Raises:
            RuntimeError: a worker that cannot start, with its own words.
        """
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

    def _run(self, waiting: deque[tuple[int, str, str]], verdicts: list[bool]) -> None:
        """Feed idle workers, collect answers, replace workers that die or overrun."""
        self._hire(len(waiting))
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
                self._dismiss(worker, "gave no sign")
            self._hire(len(waiting))

    def _collect(self, worker: _Worker, verdicts: list[bool]) -> None:
        line = worker.read()
        if line is None:
            self.num_crashed += worker.item is not None
            self._dismiss(worker, "ended")
        elif worker.item is not None and line:
            verdicts[worker.item] = json.loads(line)
            worker.rest()

    def _dismiss(self, worker: _Worker, what: str) -> None:
        """Kill and forget a worker; one that never came up is an error, not a wrong answer."""
        worker.kill()
        self._workers.remove(worker)
        if not worker.started:
            raise RuntimeError(
                f"a grading worker {what} before it was ready (is math-verify installed?): "
                f"{worker.last_words()}"
            )

    def _hire(self, num_waiting: int) -> None:
        busy = sum(worker.item is not None for worker in self._workers)
        for _ in range(min(self._max_workers, busy + num_waiting) - len(self._workers)):
            self._workers.append(_Worker(2 * self.timeout_seconds + 10))


class _Worker:
    """One subprocess: at most one item at a time, and a deadline for whatever it does."""

    def __init__(self, orphan_seconds: float):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the worker)
        # -P: its own folder is no place to import from. A session of its own: Ctrl-C is ours.
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
        self.item: int | None = None  # index of the item it works on
        self.deadline = time.monotonic() + _START_SECONDS

    @property
    def idle(self) -> bool:
        return self.started and self.item is None

    def send(self, index: int, response: str, gold: str, timeout_seconds: float) -> None:
        self.item = index
        self.deadline = time.monotonic() + timeout_seconds
        # A surrogate half, as broken byte-level decoding leaves it, survives as a JSON escape.
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
            self.rest()
            self.started = True
            return ""
        return line

    def rest(self) -> None:
        self.item = None
        self.deadline = float("inf")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.answers.close()
        # Broken when it died with an item half sent.
        with contextlib.suppress(BrokenPipeError):
            self._items.close()

    def last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-2000:] or "(it said nothing)"


def _after_thought(item: GradingItem) -> str | None:
    """What follows the last </think>; None for a thought that was opened and never closed."""
    _, end, answer = item.response.rpartition(_THINK_END)
    if end:
        return answer
    opened = item.opens_thinking or item.response.lstrip().startswith("<think>")
    return None if opened else item.response
