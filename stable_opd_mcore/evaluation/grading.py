"""Grade responses: by math-verify, by an exact "[answer]" at the end, or by the user's function.

math-verify passes model output to sympy, which may run for hours or use all memory; a user's
function may do anything. So both run in processes that can be killed: an item that exceeds its time
counts as wrong, and its worker is replaced. Workers are spawned; a fork would hold the trainer's
device and process groups.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from pebble import CONSTS, ProcessExpired, ProcessPool

from stable_opd_mcore.data.thoughts import split_thought
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.grading_worker import graded, rewarded, start_worker
from stable_opd_mcore.host.user_code import Reward, UserFunction
from stable_opd_mcore.host.worker_processes import LOADING_SECONDS
from stable_opd_mcore.records import AnswerFormat, GradingFailure, Rollout

CONSTS.term_timeout = 0.0  # pebble's wait between SIGTERM, which workers ignore, and SIGKILL
_START_SECONDS = 600.0  # the longest that workers take to start
_LOG = logging.getLogger(__name__)
Rewards = Mapping[str, UserFunction | None]
_NO_REWARDS: Rewards = {}


@dataclass(frozen=True)
class GradingItem:
    response: str  # without its stop token
    gold: str
    answer_format: AnswerFormat = "boxed"
    opens_thinking: bool = False  # the prompt ended inside a thought
    stopped: bool = True  # the response ended with a stop token


@dataclass(frozen=True)
class RewardItem:
    """One response for a function of the user's."""

    reward: str  # which one: a key of Grader.rewards
    columns: Mapping[str, Any]  # the row, as its source has it
    response: str  # without its stop token


@dataclass(frozen=True)
class Verdict:
    """What a response is worth; with a failure it counts as wrong."""

    reward: float  # 0 or 1; a user's function may return any finite number
    failure: GradingFailure | None = None  # over its time, or the worker ended (memory, recursion)
    feedback: str | None = None  # see Rollout

    @property
    def is_right(self) -> bool:
        return self.reward == 1


class Grader:
    """Grades items in worker processes, which start with the first item that needs one.

    Verdicts depend on time limits. Ranks that need equal verdicts must take those of one rank.

    Args:
        timeout_seconds: limit for one response, which then counts as wrong.
        rewards: functions that judge rollouts in place of their gold answers, by the source of the
            prompt; "" for all others. None: the gold answer counts.
    """

    def __init__(
        self, timeout_seconds: float = 10.0, workers: int = 2, rewards: Rewards = _NO_REWARDS
    ):
        assert timeout_seconds > 0 and workers > 0
        self.rewards: Rewards = {"": None, **rewards}
        self.timeout_seconds = timeout_seconds
        self._num_workers = workers
        self._pool: ProcessPool | None = None
        self._has_graded = False  # then math-verify is installed and workers start
        self._has_warned = False

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

    def grade(self, items: Iterable[GradingItem | RewardItem]) -> Iterator[Verdict]:
        """The verdicts in the order of the items, which are taken as workers get free.

        "bracket": right if the response stopped directly after "[gold]". "boxed": math-verify
        decides on the answer after the thought; a thought that has no end is wrong.

        Raises:
            UserError: the file of the user's function fails; standard error says why.
            RuntimeError: workers cannot start; likewise.
        """
        waiting: deque[Verdict | Future[Any]] = deque()  # items whose turn has not come
        running: set[Future[Any]] = set()
        try:
            for item in items:
                work = _verdict_or_call(item)
                if isinstance(work, Verdict):
                    waiting.append(work)
                else:
                    self._drop_broken_pool(running)
                    future = self._submit(*work)
                    waiting.append(future)
                    running.add(future)
                if len(running) == 2 * self._num_workers:  # one graded, one ready for each
                    running = self._wait(running)
                while waiting and waiting[0] not in running:
                    yield self._verdict(waiting.popleft())
            yield from map(self._verdict, waiting)
        finally:  # the caller may have stopped asking
            for future in running:
                future.cancel()  # ends the worker that grades it

    def grade_rollouts(self, rollouts: Sequence[Rollout], by_source: bool = True) -> list[Rollout]:
        """The rollouts with rewards: those of the user's function, which sees the rows' columns; or
        1.0 and 0.0, and None without a gold answer.

        Where the function fails, the reward is 0, or the lowest of the prompt's other rollouts here
        where that is below 0: a failure is never worth more than a bad response.

        With `by_source` the function of a source judges its prompts. Not for held-out ones: their
        file may have the name of a source.
        """
        items = {place: self._item(rollout, by_source) for place, rollout in enumerate(rollouts)}
        graded = {place: item for place, item in items.items() if item is not None}
        verdicts = dict(zip(graded, self.grade(graded.values()), strict=True))
        lowest: dict[str, float] = {}
        for place, found in verdicts.items():
            prompt_id = rollouts[place].prompt.prompt_id
            lowest[prompt_id] = min(lowest.get(prompt_id, 0.0), found.reward)
        found_rollouts = list(rollouts)
        for place, found in verdicts.items():
            rollout = rollouts[place]
            reward = lowest[rollout.prompt.prompt_id] if found.failure else found.reward
            found_rollouts[place] = replace(
                rollout,
                reward=float(reward),
                grading_failure=found.failure,
                feedback=found.feedback,
            )
        return found_rollouts

    def _item(self, rollout: Rollout, by_source: bool = True) -> GradingItem | RewardItem | None:
        prompt = rollout.prompt
        if prompt.environment is not None:  # which has rewarded it
            return None
        source = prompt.prompt_id.rpartition(":")[0]
        reward = source if by_source and source in self.rewards else ""
        if self.rewards[reward] is not None:
            return RewardItem(reward, prompt.columns or {}, rollout.text)
        if prompt.answer is None:
            return None
        stopped = rollout.finish_reason == Ending.STOP
        form, opens_thinking = prompt.answer_format, prompt.opens_thinking
        return GradingItem(rollout.text, prompt.answer, form, opens_thinking, stopped)

    def _wait(self, running: set[Future[Any]]) -> set[Future[Any]]:
        """Wait until one of them has ended, and return the others.

        pebble forgets an item whose worker ends between its receipt and the acknowledgement.
        """
        deadline = time.monotonic() + 2 * self.timeout_seconds + _START_SECONDS
        while True:
            ended, others = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            if ended:
                return others
            if time.monotonic() > deadline:
                self.close()
            self._drop_broken_pool(running)

    def _drop_broken_pool(self, running: set[Future[Any]]) -> None:
        """Close a pool whose workers have ended, and end what it has lost: pebble forgets a task
        that it gets meanwhile."""
        if self._pool is None or not self._pool.active:
            self.close()
            for future in running:
                if not future.done():
                    future.set_exception(BrokenProcessPool("the workers ended before it"))

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._pool is None:
            self._pool = ProcessPool(
                self._num_workers,
                initializer=start_worker,
                initargs=(dict(self.rewards),),
                context=multiprocessing.get_context("spawn"),
            )
        limit = self.timeout_seconds
        arguments = (*arguments, 2 * limit + 10)  # an orphan ends itself then
        try:
            return self._pool.schedule(function, args=arguments, timeout=limit)
        except RuntimeError as error:  # the workers have ended already
            lost: Future[Any] = Future()
            lost.set_exception(BrokenProcessPool(str(error)))
            return lost

    def _verdict(self, future: Verdict | Future[Any]) -> Verdict:
        if isinstance(future, Verdict):
            return future
        try:
            self._wait({future})
            found = future.result()
        except TimeoutError:
            return Verdict(False, "timeout")
        except ProcessExpired:
            return Verdict(False, "crash")
        except BrokenProcessPool as error:
            paths = ", ".join(dict.fromkeys(own.path for own in self.rewards.values() if own))
            if not self._has_graded and paths:
                raise UserError(
                    f"{paths}: running it fails, or takes more than {LOADING_SECONDS} s; fix the "
                    "error above"
                ) from error
            if not self._has_graded:
                raise RuntimeError(
                    "grading workers end before they are ready; see their error above, and check "
                    "that math-verify is installed"
                ) from error
            return Verdict(False, "crash")
        self._has_graded = True
        if isinstance(found, Reward):
            return Verdict(found.value, feedback=found.feedback)
        if not isinstance(found, tuple):
            return Verdict(found)
        failure, why = found
        if not self._has_warned:
            _LOG.warning(
                "a reward failed and counts as 0 or less; later failures are not logged: %s", why
            )
            self._has_warned = True
        return Verdict(0, failure)


def _verdict_or_call(item: GradingItem | RewardItem) -> Verdict | tuple[Any, ...]:
    """The verdict where it is clear, else what a worker calls, with its arguments."""
    if isinstance(item, RewardItem):
        return rewarded, item.reward, item.columns, item.response
    if item.answer_format == "bracket":
        return Verdict(item.stopped and item.response.endswith(f"[{item.gold}]"))
    answer = split_thought(item.response, item.opens_thinking).answer
    return Verdict(False) if answer is None else (graded, answer, item.gold)
