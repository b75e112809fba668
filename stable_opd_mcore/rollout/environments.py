"""Environments of episodes: generators of the user's, played in processes that can be killed.

A worker is a thread here and a process (environment_worker.py) that holds the generators of many
episodes. It gives one answer after another, so that a time limit ends the one that takes too long
and no other. With asynchronous generators it has many threads, each of which waits for an answer.
Where such a process ends, any episode that waited may be the cause: each of them is played on by a
worker that gives one answer after another.

The pool keeps each episode's row, seed and the student's texts. From these it plays the episode
again where the process has ended, and once where the episode itself has failed. If the environment
then answers otherwise, the caller is told to begin the episode anew.

Not here: tokens, limits on turns, what a failed episode means for training (the engines).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import xxhash

from stable_opd_mcore.host.user_code import UserFunction
from stable_opd_mcore.host.worker_processes import set_future
from stable_opd_mcore.rollout.environment_answers import Answer
from stable_opd_mcore.rollout.environment_process import (
    EnvironmentFailure,
    EnvironmentProcess,
    cannot_start,
)

_MAX_FAILURES = 2  # of one episode; the last one ends it
_EPISODES_PER_PROCESS = 1000  # then it is replaced, because environments leak memory
_ANSWERS_AT_ONCE = 256  # of a process with asynchronous generators
_JOIN_SECONDS = 12.0  # more than a process takes to end by itself
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class _Played:
    """An episode that the pool plays."""

    key: Hashable
    number: int
    row: Mapping[str, Any]
    seed: int
    num_failures: int
    is_counted: bool
    said: list[tuple[str, bool]] = field(default_factory=list)  # the student's turns so far
    answers: list[str] = field(default_factory=list)  # hash of each answer so far
    worker: _Worker | None = None
    process: EnvironmentProcess | None = None  # where its generator has been last
    future: Future[Answer | None] | None = None  # of the last answer that was asked for
    is_closed: bool = False
    playing: threading.Lock = field(default_factory=threading.Lock)  # it does one thing at a time


class _Worker:
    """Threads that take jobs one after another, and the process that they start for them."""

    def __init__(
        self, new_process: Callable[[], EnvironmentProcess], max_opened: int, max_asked: int
    ) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: end
        self.num_episodes = 0  # assigned to this worker
        self._new_process, self._max_opened, self._max_asked = new_process, max_opened, max_asked
        self._process: EnvironmentProcess | None = None
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_ended = 0  # threads

    def put(self, job: Callable[[], object] | None) -> None:
        """Give a job to a thread; None ends them, after all other jobs."""
        self._jobs.put(job)
        if len(self._threads) < min(self._max_asked, self.num_episodes):
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()

    def load(self) -> tuple[bool, int]:
        """The worker with the least load gets the next episode."""
        process = self._process
        drains = process is not None and self._is_used_up(process) and bool(process.episodes)
        return drains, self.num_episodes

    def process(self, number: int) -> EnvironmentProcess:
        """The process that gives an episode's next answer, a new one if the last has ended. Raises
        EnvironmentFailure if it cannot start."""
        with self._starting:
            process = self._process
            is_idle = process and self._is_used_up(process) and not process.episodes
            if process is None or is_idle or process.has_ended():
                if process is not None:
                    process.end()
                process = self._process = self._new_process()
                process.load()
            process.episodes.add(number)
            return process

    def join(self) -> None:
        """Wait for the end of threads and process, but for no answer that takes too long."""
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is not None:
            self._process.kill()
        for thread in self._threads:
            thread.join()

    def _is_used_up(self, process: EnvironmentProcess) -> bool:
        return process.has_failed or process.num_opened >= self._max_opened

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._jobs.put(None)  # for the next thread
        with self._starting:
            self._num_ended += 1
            if self._process is not None and self._num_ended == len(self._threads):
                self._process.end()


class EnvironmentPool:
    """Plays episodes of one function. Safe to use from many threads.

    A future is None where the environment, played again, gave other answers: the key is free, and
    whoever asked opens the episode again and samples its turns anew. Its earlier failures still
    count.

    Only `shutdown` blocks. Futures are set in a worker's thread: their callbacks may use the pool
    but must not wait for an answer. A future raises UserError where the user's file fails as it is
    imported; `shutdown` cancels those that are not set yet.

    Args:
        function: returns a generator for a row and a seed; see docs/environments.md.
        workers: number of processes; each holds many episodes.
        timeout_seconds: limit of one answer.
        memory_gib: address space of a process.
        logs: the beginning of the path of each worker's file of what its episodes print and raise;
            None: there is none.
        progress: called after each answer, in a worker's thread, even if it failed.
    """

    def __init__(
        self,
        function: UserFunction,
        workers: int = 4,
        timeout_seconds: float = 60.0,
        memory_gib: float = 4.0,
        progress: Callable[[], None] = lambda: None,
        logs: Path | None = None,
    ) -> None:
        assert workers > 0 and timeout_seconds > 0 and memory_gib > 0
        self._function, self._progress = function, progress
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._episodes: dict[Hashable, _Played] = {}
        self._failures_of: dict[Hashable, int] = {}  # of each episode that is to begin anew
        self._counts: Counter[str] = Counter()
        self._has_started = self._has_warned = self._is_over = False
        # Processes are replaced at different times, so that some worker always takes episodes.
        limits = (_EPISODES_PER_PROCESS * (1 + place / workers) for place in range(workers))
        new_process = partial(EnvironmentProcess, function, timeout_seconds, memory_gib)
        log_of = [logs and Path(f"{logs}_worker_{number}.log") for number in range(workers + 1)]
        self._workers = [
            _Worker(
                partial(new_process, log), int(limit), _ANSWERS_AT_ONCE if function.is_async else 1
            )
            for log, limit in zip(log_of, limits, strict=False)
        ]
        self._one_by_one = _Worker(partial(new_process, log_of[-1]), _EPISODES_PER_PROCESS, 1)

    def open(
        self, key: Hashable, row: Mapping[str, Any], seed: int, is_counted: bool = True
    ) -> Future[Answer | None]:
        """Begin an episode, which has the key until it is over.

        is_counted: whether it is part of what `take_counts` returns.
        """
        with self._lock:
            assert key not in self._episodes, f"an episode with the key {key} is open"
            failures = self._failures_of.pop(key, 0)
            episode = _Played(key, next(self._numbers), row, seed, failures, is_counted)
            self._episodes[key] = episode
            return self._ask(episode)

    def say(self, key: Hashable, text: str, truncated: bool = False) -> Future[Answer | None]:
        """Give the student's turn to an episode, whose last answer has come."""
        with self._lock:
            episode = self._episodes[key]
            assert episode.future is None or episode.future.done(), "its last answer has not come"
            episode.said.append((text, truncated))
            return self._ask(episode)

    def close(self, key: Hashable) -> None:
        """Give an episode up, if it is not over. An answer that it was asked for may not come."""
        with self._lock:
            self._failures_of.pop(key, None)
            episode = self._episodes.get(key)
            if episode is not None:
                self._forget(episode)
                assert episode.worker is not None
                episode.worker.put(partial(self._give_up, episode))

    def take_counts(self) -> Counter[str]:
        """Counts since the last call: `answers`, `replays`, `not_repeatable`, and the failed
        episodes by `timeout`, `crash` and `invalid`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return counts

    def shutdown(self) -> None:
        """End all processes; those that give no answer close their generators first."""
        with self._lock:
            self._is_over = True
            futures = [episode.future for episode in self._episodes.values() if episode.future]
        for future in futures:
            future.cancel()
        workers = (*self._workers, self._one_by_one)
        for worker in workers:
            worker.put(None)
        for worker in workers:
            worker.join()

    # ---- with the lock held

    def _ask(self, episode: _Played) -> Future[Answer | None]:
        episode.future = Future()
        if self._is_over:
            episode.future.cancel()
        else:
            self._assign(episode, episode.future)
        return episode.future

    def _assign(
        self, episode: _Played, future: Future[Answer | None], unlike: _Worker | None = None
    ) -> None:
        """Let the episode's worker play on, or the one with the least load if it has none."""
        if episode.worker is None:
            others = [worker for worker in self._workers if worker is not unlike]
            episode.worker = min(others or self._workers, key=_Worker.load)
            episode.worker.num_episodes += 1
        episode.worker.put(partial(self._play, episode.worker, episode, future))

    def _forget(self, episode: _Played) -> None:
        if not episode.is_closed and episode.worker is not None:
            episode.is_closed = True
            episode.worker.num_episodes -= 1
            del self._episodes[episode.key]

    def _plays_again(
        self, episode: _Played, future: Future[Answer | None], failure: EnvironmentFailure
    ) -> bool:
        """Whether another worker, where there is one, plays an episode after this failure."""
        episode.num_failures += not failure.is_shared
        if not self._has_warned:
            _LOG.warning("an environment failed; later failures are not logged: %s", failure)
            self._has_warned = True
        worker = episode.worker
        if episode.num_failures >= _MAX_FAILURES or worker is None:
            return False
        worker.num_episodes -= 1
        episode.worker = episode.process = None
        if failure.is_shared or worker is self._one_by_one:
            episode.worker = self._one_by_one
            episode.worker.num_episodes += 1
        self._count_replay(episode)
        self._assign(episode, future, unlike=worker)
        return True

    def _count_replay(self, episode: _Played) -> None:
        self._count(episode, "replays")

    def _count(self, episode: _Played, name: str) -> None:
        if episode.is_counted:
            self._counts[name] += 1

    def _note(self, episode: _Played, answer: Answer | None) -> None:
        self._count(episode, "answers")
        if answer is None:
            self._count(episode, "not_repeatable")
            self._failures_of[episode.key] = episode.num_failures
        elif answer.failure is not None:
            self._count(episode, answer.failure)
        if answer is None or answer.is_last:
            self._forget(episode)

    # ---- in a worker's thread

    def _play(self, worker: _Worker, episode: _Played, future: Future[Answer | None]) -> None:
        """Set the future to the episode's next answer, unless another worker has to play it."""
        try:
            with episode.playing:
                if episode.is_closed:
                    future.cancel()
                if future.cancelled():
                    return
                answer = self._answer(worker, episode)
        except EnvironmentFailure as failure:
            if not self._has_started:
                set_future(future, cannot_start(self._function))
                return
            self._progress()
            with self._lock:
                is_over = episode.is_closed or future.cancelled()
                if not is_over and self._plays_again(episode, future, failure):
                    return
            answer = Answer(reward=0.0, failure=failure.failure, reason=str(failure))
        except Exception as error:  # it belongs to whoever waits for the future
            set_future(future, error)
            return
        self._progress()
        with self._lock:
            if not episode.is_closed:
                self._note(episode, answer)
        set_future(future, answer)

    def _answer(self, worker: _Worker, episode: _Played) -> Answer | None:
        """The answer to the student's last turn, after those that this process has not seen."""
        process, taken = worker.process(episode.number), len(episode.answers)
        self._has_started = True
        if episode.process is not process:
            if episode.process is not None:
                with self._lock:
                    self._count_replay(episode)
            episode.process, taken = process, 0
        answer: Answer | None = None
        for turn in range(taken, len(episode.said) + 1):
            if turn == 0:
                answer = process.open(episode.number, episode.row, episode.seed)
            else:
                answer = process.say(episode.number, *episode.said[turn - 1])
            found = xxhash.xxh3_128_hexdigest(answer.encoded())
            if turn == len(episode.answers):
                episode.answers.append(found)
            elif episode.answers[turn] != found:
                self._close(process, episode)
                return None
        return answer

    def _give_up(self, episode: _Played) -> None:
        with episode.playing:
            self._close(episode.process, episode)

    def _close(self, process: EnvironmentProcess | None, episode: _Played) -> None:
        """Close the episode's generator where the process has it. Nobody waits for that."""
        with suppress(EnvironmentFailure):
            if process is not None:
                process.close(episode.number)
