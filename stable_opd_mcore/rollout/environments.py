"""Environments of episodes: generators of the user's, played in processes that can be killed.

A worker is a thread here and a process (environment_worker.py) that holds the generators of many
episodes. It plays one step after another, so that a time limit ends the step that takes too long
and no other. Of each episode the pool keeps row, seed and the student's texts. From these it plays
the episode again where the process has ended, and once where the episode itself has failed. If the
environment then answers otherwise, the caller is told to begin the episode anew.

Not here: tokens, limits on turns, what a failed episode means for training (the engines).
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import xxhash

from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.user_code import UserFunction
from stable_opd_mcore.host.worker_processes import set_future
from stable_opd_mcore.records import GradingFailure
from stable_opd_mcore.rollout.environment_process import EnvironmentFailure, EnvironmentProcess

_MAX_FAILURES = 2  # of one episode; the last one ends it
_EPISODES_PER_PROCESS = 1000  # then it is replaced, because environments leak memory
_JOIN_SECONDS = 12.0  # more than a process takes to end by itself
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What an environment answers to the opening of an episode, or to a turn of the student."""

    # What the student reads next; to an opening: in place of the row's own prompt. None: the row's
    # prompt stands, or nothing follows.
    observed: tuple[Message, ...] | None = None
    restarts: bool = False  # `observed` is a whole new context, not the continuation of the old one
    done: bool = False  # the episode is over, and its key is free
    reward: float | None = None  # 0 to 1, of an episode that is done; with a failure 0
    failure: GradingFailure | None = None
    reason: str = ""  # of the failure, for people
    replays: int = 0  # times that the episode was played again
    # Played again, the environment gave other answers. The key is free: open the episode again and
    # sample its turns anew. Its earlier failures still count.
    not_repeatable: bool = False


@dataclass(eq=False)
class _Episode:
    key: Hashable
    number: int
    row: Mapping[str, Any]
    seed: int
    num_failures: int
    is_counted: bool
    num_replays: int = 0
    said: list[tuple[str, bool]] = field(default_factory=list)  # the student's turns so far
    answers: list[str] = field(default_factory=list)  # hash of each answer so far
    worker: _Worker | None = None
    process: EnvironmentProcess | None = None  # where its generator has been last
    future: Future[Step] | None = None  # of the last step that was asked for
    is_closed: bool = False


class _Worker:
    """A thread that takes jobs one after another, and the process that it starts for them."""

    def __init__(self, new_process: Callable[[], EnvironmentProcess], max_opened: int) -> None:
        self.jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: end
        self.num_episodes = 0  # assigned to this worker
        self._new_process, self._max_opened = new_process, max_opened
        self._process: EnvironmentProcess | None = None
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    def load(self) -> tuple[bool, int]:
        """The worker with the least load gets the next episode."""
        process = self._process
        drains = process is not None and self._is_used_up(process) and bool(process.episodes)
        return drains, self.num_episodes

    def process(self) -> EnvironmentProcess:
        """The process of the next step. Raises EnvironmentFailure if it cannot start."""
        process = self._process
        if process is not None:
            is_idle = self._is_used_up(process) and not process.episodes
            if not is_idle and not process.has_ended():
                return process
            process.end()
        self._process = self._new_process()
        self._process.load()
        return self._process

    def join(self) -> None:
        """Wait for the end of thread and process; a step that takes too long is not waited for."""
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _is_used_up(self, process: EnvironmentProcess) -> bool:
        return process.has_failed or process.num_opened >= self._max_opened

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
        if self._process is not None:
            self._process.end()


class EnvironmentPool:
    """Plays episodes of one function. Safe to use from many threads.

    Only `shutdown` blocks. Futures are set in a worker's thread: their callbacks may use the pool
    but must not wait for a step. A future raises UserError where the user's file fails as it is
    imported; `shutdown` cancels those that are not set yet.

    Args:
        function: returns a generator for a row and a seed; see docs/environments.md.
        workers: number of processes; each holds many episodes.
        timeout_seconds: limit of one step.
        memory_gib: address space of a process.
        progress: called after each step, in a worker's thread, even if it failed.
    """

    def __init__(
        self,
        function: UserFunction,
        workers: int = 4,
        timeout_seconds: float = 60.0,
        memory_gib: float = 4.0,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        assert workers > 0 and timeout_seconds > 0 and memory_gib > 0
        self._function, self._progress = function, progress
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._episodes: dict[Hashable, _Episode] = {}
        self._failures_of: dict[Hashable, int] = {}  # of each episode that is to begin anew
        self._counts: Counter[str] = Counter()
        self._has_started = self._has_warned = self._is_over = False
        # Processes are replaced at different times, so that some worker always takes episodes.
        limits = (_EPISODES_PER_PROCESS * (1 + place / workers) for place in range(workers))
        new_process = partial(EnvironmentProcess, function, timeout_seconds, memory_gib)
        self._workers = [_Worker(new_process, int(limit)) for limit in limits]

    def open(
        self, key: Hashable, row: Mapping[str, Any], seed: int, is_counted: bool = True
    ) -> Future[Step]:
        """Begin an episode, which has the key until it is over.

        is_counted: whether it is part of what `take_counts` returns.
        """
        with self._lock:
            assert key not in self._episodes, f"an episode with the key {key} is open"
            failures = self._failures_of.pop(key, 0)
            episode = _Episode(key, next(self._numbers), row, seed, failures, is_counted)
            self._episodes[key] = episode
            return self._ask(episode)

    def say(self, key: Hashable, text: str, truncated: bool = False) -> Future[Step]:
        """Give the student's turn to an episode, whose last step has come."""
        with self._lock:
            episode = self._episodes[key]
            assert episode.future is None or episode.future.done(), "its last step has not come"
            episode.said.append((text, truncated))
            return self._ask(episode)

    def close(self, key: Hashable) -> None:
        """Give an episode up, if it is not over. A step that it was asked for may not come."""
        with self._lock:
            self._failures_of.pop(key, None)
            episode = self._episodes.get(key)
            if episode is not None:
                self._forget(episode)
                assert episode.worker is not None
                episode.worker.jobs.put(lambda: self._close(episode.process, episode))

    def take_counts(self) -> Counter[str]:
        """Counts since the last call: `steps`, `replays`, `not_repeatable`, and failed episodes by
        `timeout`, `crash` and `invalid`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return counts

    def shutdown(self) -> None:
        """End all processes; those that play no step close their generators first."""
        with self._lock:
            self._is_over = True
            futures = [episode.future for episode in self._episodes.values() if episode.future]
        for future in futures:
            future.cancel()
        for worker in self._workers:
            worker.jobs.put(None)
        for worker in self._workers:
            worker.join()

    # ---- with the lock held

    def _ask(self, episode: _Episode) -> Future[Step]:
        episode.future = Future()
        if self._is_over:
            episode.future.cancel()
        else:
            self._assign(episode, episode.future)
        return episode.future

    def _assign(
        self, episode: _Episode, future: Future[Step], unlike: _Worker | None = None
    ) -> None:
        """Let the episode's worker play on, or the one with the least load if it has none."""
        if episode.worker is None:
            others = [worker for worker in self._workers if worker is not unlike]
            episode.worker = min(others or self._workers, key=_Worker.load)
            episode.worker.num_episodes += 1
        episode.worker.jobs.put(partial(self._play, episode.worker, episode, future))

    def _forget(self, episode: _Episode) -> None:
        if not episode.is_closed and episode.worker is not None:
            episode.is_closed = True
            episode.worker.num_episodes -= 1
            del self._episodes[episode.key]

    def _plays_again(
        self, episode: _Episode, future: Future[Step], failure: EnvironmentFailure
    ) -> bool:
        """Whether another worker, where there is one, plays an episode after this failure."""
        episode.num_failures += 1
        if not self._has_warned:
            _LOG.warning("an environment failed; later failures are not logged: %s", failure)
            self._has_warned = True
        worker = episode.worker
        if episode.num_failures >= _MAX_FAILURES or worker is None:
            return False
        worker.num_episodes -= 1
        episode.worker = episode.process = None
        self._count_replay(episode)
        self._assign(episode, future, unlike=worker)
        return True

    def _count_replay(self, episode: _Episode) -> None:
        episode.num_replays += 1
        self._count(episode, "replays")

    def _count(self, episode: _Episode, name: str) -> None:
        if episode.is_counted:
            self._counts[name] += 1

    def _note(self, episode: _Episode, step: Step) -> None:
        self._count(episode, "steps")
        if step.failure is not None:
            self._count(episode, step.failure)
        if step.not_repeatable:
            self._count(episode, "not_repeatable")
            self._failures_of[episode.key] = episode.num_failures
        if step.done or step.not_repeatable:
            self._forget(episode)

    # ---- in a worker's thread

    def _play(self, worker: _Worker, episode: _Episode, future: Future[Step]) -> None:
        """Set the future to the episode's next step, unless another worker has to play it."""
        if episode.is_closed:
            future.cancel()
        if future.cancelled():
            return
        try:
            step = self._step(worker, episode)
        except EnvironmentFailure as failure:
            if not self._has_started:
                set_future(future, self._cannot_start())
                return
            self._progress()
            with self._lock:
                is_over = episode.is_closed or future.cancelled()
                if not is_over and self._plays_again(episode, future, failure):
                    return
            step = Step(done=True, reward=0.0, failure=failure.failure, reason=str(failure))
        except Exception as error:  # it belongs to whoever waits for the future
            set_future(future, error)
            return
        self._progress()
        with self._lock:
            if not episode.is_closed:
                self._note(episode, step)
        set_future(future, replace(step, replays=episode.num_replays))

    def _step(self, worker: _Worker, episode: _Episode) -> Step:
        """The answer to the student's last turn, after those that this process has not seen."""
        process, taken = worker.process(), len(episode.answers)
        self._has_started = True
        if episode.process is not process:
            if episode.process is not None:
                with self._lock:
                    self._count_replay(episode)
            episode.process, taken = process, 0
        answer: dict[str, Any] = {}
        for turn in range(taken, len(episode.said) + 1):
            if turn == 0:
                answer = process.open(episode.number, episode.row, episode.seed)
            else:
                answer = process.say(episode.number, *episode.said[turn - 1])
            found = xxhash.xxh3_128_hexdigest(json.dumps(answer).encode())
            if turn == len(episode.answers):
                episode.answers.append(found)
            elif episode.answers[turn] != found:
                self._close(process, episode)
                return Step(not_repeatable=True)
        if "reward" in answer:
            return Step(done=True, reward=answer["reward"])
        messages = answer["messages"]
        return Step(None if messages is None else tuple(messages), answer["restarts"])

    def _close(self, process: EnvironmentProcess | None, episode: _Episode) -> None:
        """Close the episode's generator where the process has it. Nobody waits for that."""
        with suppress(EnvironmentFailure):
            if process is not None:
                process.close(episode.number)

    def _cannot_start(self) -> UserError:
        return UserError(
            f"{self._function.path}: running it fails, or takes more than a minute; fix the error "
            "above"
        )
