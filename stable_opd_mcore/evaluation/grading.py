"""Grade final answers: with math-verify in worker processes, or by an exact "[answer]" at the end.

math-verify passes model output to sympy, which may run for hours or use all memory. So it runs in
processes that can be killed: an item that exceeds its time counts as wrong, and its worker is
replaced. Workers are spawned; a fork would hold the trainer's device and process groups. Not here:
what a worker does (grading_worker.py).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from pebble import CONSTS, ProcessExpired, ProcessPool

from stable_opd_mcore.evaluation.grading_worker import graded, start_worker
from stable_opd_mcore.records import AnswerFormat, GradingFailure, Rollout

CONSTS.term_timeout = 0.0  # pebble's wait between SIGTERM, which workers ignore, and SIGKILL
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
        self._num_workers = workers
        self._pool: ProcessPool | None = None
        self._has_graded = False  # then math-verify is installed and workers start

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; the next items start new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def grade(self, items: Sequence[GradingItem]) -> list[Verdict]:
        """Verdicts in the order of the items; see `grade_stream`."""
        verdicts = dict(self.grade_stream(items))
        return [verdicts[index] for index in range(len(items))]

    def grade_stream(self, items: Iterable[GradingItem]) -> Iterator[tuple[int, Verdict]]:
        """(index of the item, its verdict) as verdicts come; takes items as workers get free.

        "bracket": right if the response stopped directly after "[gold]". "boxed": math-verify
        decides on the text after </think>; a response that never closes its <think> is wrong.

        Raises:
            RuntimeError: workers cannot start; standard error says why.
        """
        pending: dict[Future[bool], int] = {}
        try:
            for index, item in enumerate(items):
                answer = _after_thought(item)
                if item.answer_format == "bracket":
                    bracket = item.stopped and item.response.endswith(f"[{item.gold}]")
                    yield index, Verdict(bracket)
                elif answer is None:
                    yield index, Verdict(False)
                else:
                    pending[self._submit(answer, item.gold)] = index
                    if len(pending) >= 2 * self._num_workers:  # one graded, one ready for each
                        yield from self._finished(pending)
            while pending:
                yield from self._finished(pending)
        finally:  # the caller may have stopped asking
            for future in pending:
                future.cancel()  # ends the worker that grades it

    def grade_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with reward 1.0 or 0.0; those without a gold answer keep None."""
        with_gold = [rollout for rollout in rollouts if rollout.prompt.answer is not None]
        verdicts = iter(self.grade([grading_item(rollout) for rollout in with_gold]))
        return [
            rollout if rollout.prompt.answer is None else _with_verdict(rollout, next(verdicts))
            for rollout in rollouts
        ]

    def _submit(self, answer: str, gold: str) -> Future[bool]:
        if self._pool is None or not self._pool.active:  # not active: a worker died while idle
            self.close()
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPool(self._num_workers, initializer=start_worker, context=context)
        orphan_seconds = 2 * self.timeout_seconds + 10
        return self._pool.schedule(
            graded, args=(answer, gold, orphan_seconds), timeout=self.timeout_seconds
        )

    def _finished(self, pending: dict[Future[bool], int]) -> list[tuple[int, Verdict]]:
        """Wait for at least one item; take it from `pending`."""
        done = wait(pending, return_when=FIRST_COMPLETED).done
        return sorted((pending.pop(future), self._verdict(future)) for future in done)

    def _verdict(self, future: Future[bool]) -> Verdict:
        try:
            verdict = Verdict(future.result())
        except TimeoutError:
            return Verdict(False, "timeout")
        except ProcessExpired:
            return Verdict(False, "crash")
        except BrokenProcessPool as error:
            if not self._has_graded:
                raise RuntimeError(
                    "grading workers end before they are ready (is math-verify installed?); their "
                    "error stands above"
                ) from error
            return Verdict(False, "crash")
        self._has_graded = True
        return verdict


def _with_verdict(rollout: Rollout, verdict: Verdict) -> Rollout:
    return replace(rollout, reward=float(verdict.is_right), grading_failure=verdict.failure)


def _after_thought(item: GradingItem) -> str | None:
    """The text after the last </think>; None if <think> was opened and never closed."""
    _, end, answer = item.response.rpartition(_THINK_END)
    if end:
        return answer
    opened = item.opens_thinking or item.response.lstrip().startswith("<think>")
    return None if opened else item.response
