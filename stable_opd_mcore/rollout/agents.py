"""Agents: functions of the user's that own their loop and call the student at a URL.

    pool.observe(asked)    # -> Future[WhatFollows], as of an environment's generator

The first `observe` of an episode gives the user's function and a URL of its own to a free process
(agent_worker.py). A request to that URL is what follows a turn; the student's next turn is the
reply. What the function returns is the end. One turn of an episode is sampled at a time: other
requests of the agent wait here. All of a pool's episodes change in one thread, which takes what
happens in order, so that neither an engine nor the thread that reads requests ever waits.

Not here: the requests of one episode (sessions.py), HTTP (serving/).
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.worker_processes import set_future
from stable_opd_mcore.records import Prompt
from stable_opd_mcore.rollout.agent_account import lost_share
from stable_opd_mcore.rollout.doorway import DOORWAY
from stable_opd_mcore.rollout.environment_answers import Answer
from stable_opd_mcore.rollout.environment_process import (
    AgentProcess,
    EnvironmentFailure,
    cannot_start,
)
from stable_opd_mcore.rollout.episodes import WhatFollows
from stable_opd_mcore.rollout.sessions import Asked, Session, Student
from stable_opd_mcore.serving.http_process import HTTP

_MAX_FAILURES = 2  # after which an episode counts as failed; before, it begins anew
_ANYWHERE = ("0.0.0.0", "::")
_LOG = logging.getLogger(__name__)


class Notes(NamedTuple):
    """Where a pool notes what is wrong."""

    failure: Callable[[Prompt, str], None]  # why an episode failed
    refusal: Callable[[str], None]  # why the run has to end


class AgentPool:
    """Plays the episodes of one agent, `workers` at a time. Safe to use from many threads; only
    `shutdown` blocks.

    A future of `observe` is None where the function failed for the first time: whoever asked begins
    the episode anew. It raises UserError where the user's file fails as it is imported.

    Args:
        students: for episodes of training, and for others.
        notes: called with an episode's row and why it failed, or why the run has to end.
        progress: called after each request and episode, in a thread of the pool.
        logs: see EnvironmentPool.
    """

    def __init__(
        self,
        settings: EnvironmentConfig,
        students: tuple[Student, Student],
        notes: Notes,
        template_kwargs: Mapping[str, Any],
        progress: Callable[[], None] = lambda: None,
        logs: Path | None = None,
    ) -> None:
        self.settings, self._students, self._notes = settings, students, notes
        self._progress, self._logs = progress, logs
        host = settings.address
        port = HTTP.listen(host, DOORWAY, template_kwargs)
        host = socket.gethostname() if host in _ANYWHERE else host
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._function = settings.read()
        self._numbers = itertools.count()
        self._sessions: dict[Hashable, Session] = {}
        self._failures_of: Counter[Hashable] = Counter()  # of episodes that are to begin anew
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._ignored: set[str] = set()  # settings of requests that were logged
        self._has_started = self._is_over = self._has_warned = False
        self._error: BaseException | None = None
        self._starting = threading.Lock()
        self._running: dict[int, AgentProcess] = {}  # by the number of the session
        self.first_rewritten = ""  # what is wrong with the first such request
        self._events: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._waiting: SimpleQueue[Session | None] = SimpleQueue()  # for a process
        works = [self._take_events, *(partial(self._play, n) for n in range(settings.workers))]
        self._threads = [
            threading.Thread(target=work, name="agents", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()

    def observe(self, asked: Asked) -> Future[WhatFollows]:
        """What follows the last turn of an episode, or comes before its first one."""
        seen = Future[WhatFollows]()
        self.post(self._observe, asked, seen)
        return seen

    def close(self, key: Hashable) -> None:
        """Give an episode up, if it is not over. What was asked may not come."""
        self.post(self._close, key)

    def take_counts(self) -> Counter[str]:
        """COUNTS and TOKENS of the training episodes that have ended since the last call. If more
        requests than environment.max_lost_share were rewritten, the run has to end."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        most, lost = self.settings.max_lost_share, lost_share(counts)
        if most is not None and lost > most:
            self._notes.refusal(
                f"{self.settings.function}: {lost:.0%} of the requests that give the student's "
                "turns back have them in another form than it said them, more than "
                f"environment.max_lost_share={most:g}; the first one: {self.first_rewritten}; let "
                "the agent send its history unchanged, or set environment.max_lost_share higher"
            )
        return counts

    def shutdown(self) -> None:
        """End all episodes and processes."""
        self.post(self._close_all)
        for _ in range(self.settings.workers):
            self._waiting.put(None)
        for thread in self._threads[1:]:
            thread.join()
        self._events.put(None)
        self._threads[0].join()

    def post(self, event: Callable[..., object], *arguments: Any) -> None:
        """Have this called in the thread in which the episodes change."""
        self._events.put(partial(event, *arguments))

    # ---- in that thread

    def _take_events(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except BaseException as error:  # raised again wherever an observation is waited for
                self._error = error
                for session in [*self._sessions.values()]:
                    session.break_off(error)
            self._progress()

    def _observe(self, asked: Asked, seen: Future[WhatFollows]) -> None:
        if self._is_over:
            seen.cancel()
        elif self._error is not None:
            set_future(seen, self._error)
        else:
            session = self._sessions.get(asked.key) or self._begun(asked)
            session.observe(asked, seen)

    def _begun(self, asked: Asked) -> Session:
        student = self._students[not asked.is_training]
        session = Session(self, next(self._numbers), asked, student, self.settings.timeout_seconds)
        self._sessions[asked.key] = session
        DOORWAY.open(session)
        self._waiting.put(session)
        return session

    def _close(self, key: Hashable) -> None:
        self._failures_of.pop(key, None)
        if (session := self._sessions.pop(key, None)) is not None:
            session.end(None)

    def _close_all(self) -> None:
        self._is_over = True
        for key in [*self._sessions]:
            self._close(key)

    def remove(self, session: Session, account: Counter[str]) -> None:
        """Forget a session that is over, and add its account to the counts of the step."""
        if self._sessions.get(session.asked.key) is not session:
            return
        del self._sessions[session.asked.key]
        with self._counting:
            self.first_rewritten = self.first_rewritten or session.first_rewritten
            if session.asked.is_training:
                self._counts += account

    def begins_anew(self, session: Session, reason: str) -> bool:
        """Whether another process plays a failed episode from its beginning."""
        key = session.asked.key
        self._failures_of[key] += 1
        if not self._has_warned:
            _LOG.warning("an agent failed; later failures are not logged: %s", reason)
            self._has_warned = True
        if self._failures_of[key] < _MAX_FAILURES:
            return True
        del self._failures_of[key]
        self._notes.failure(session.asked.episode.prompt, reason)
        return False

    def note_refusal(self, session: Session, reason: str) -> None:
        self._notes.refusal(f"prompt {session.asked.episode.prompt.prompt_id}: {reason}")

    def note_ignored(self, names: Sequence[str]) -> None:
        """Log settings of requests that have no effect, each once."""
        if new := [name for name in names if name not in self._ignored]:
            self._ignored.update(new)
            text = "requests of the agent set %s, which has no effect: the run's settings hold"
            _LOG.warning(text, ", ".join(new))

    def stop(self, session: Session) -> None:
        """Close the URL of a session that is over, and kill its processes."""
        DOORWAY.close(session)
        with self._starting:
            process = self._running.get(session.number)
        if process is not None:
            process.stop(session.number)

    # ---- in a thread for each process

    def _play(self, number: int) -> None:
        log = self._logs and Path(f"{self._logs}_worker_{number}.log")
        limits = self.settings.timeout_seconds, self.settings.memory_gib
        process: AgentProcess | None = None
        while (session := self._waiting.get()) is not None:
            try:
                if process is None or process.has_ended():
                    process = AgentProcess(self._function, *limits, log)
                    process.load()
                self._has_started = True
                result = self._returned(process, session)
            except EnvironmentFailure as failure:
                result = failure if self._has_started else cannot_start(self._function)
            except BaseException as error:  # a defect of this project
                result = UserError(f"an agent's process: {error!r}")
            if result is not None:
                self.post(session.returned, result)
        if process is not None:
            process.end()

    def _returned(self, process: AgentProcess, session: Session) -> Answer | None:
        """What the user's function returned; None if the session was over before it began."""
        with self._starting:
            if session.is_over:
                return None
            self._running[session.number] = process
            session.clock.set(runs=True, anew=True)
            url = f"{self._url}/{session.secret}/v1"
            process.begin(session.number, session.row, session.asked.seed, url)
        try:
            return process.wait(session.number, session.clock.left)
        finally:
            with self._starting:
                del self._running[session.number]
