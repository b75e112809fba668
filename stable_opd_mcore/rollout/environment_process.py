"""The trainer's end of a process that holds episodes (environment_worker.py) or plays one agent's
after another (agent_worker.py). A thread takes its answers, and gives each to who waits for it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.user_code import UserFunction
from stable_opd_mcore.host.worker_processes import LOADING_SECONDS, start_process
from stable_opd_mcore.records import GradingFailure
from stable_opd_mcore.rollout.environment_answers import MAX_ANSWER_BYTES, Answer
from stable_opd_mcore.rollout.environment_worker import READY, how_it_ended, took_too_long
from stable_opd_mcore.serving.channel import send_message

_LONGEST_START_SECONDS = LOADING_SECONDS + 30.0  # the process itself limits the import
_LARGEST_LOG_BYTES = 16 * 2**20  # of a file to which another process appends
_CLOSING_SECONDS = 10.0  # the process itself takes half of it
_SAME_HASHES = {"PYTHONHASHSEED": "0"}  # sets have the same order in each process


class EnvironmentFailure(Exception):
    """An answer or the start failed; the text says how.

    is_shared: the process has ended, and others waited for answers too: any of them may be the
        cause.
    """

    def __init__(self, failure: GradingFailure, reason: str, is_shared: bool = False) -> None:
        super().__init__(reason)
        self.failure: GradingFailure = failure
        self.is_shared = is_shared


def cannot_start(function: UserFunction) -> UserError:
    """For a function whose first process fails as it starts."""
    return UserError(
        f"{function.path}: running it fails, or takes more than {LOADING_SECONDS} s; fix the "
        "error above"
    )


class EnvironmentProcess:
    """A process that starts now; `load` waits for it. One thread uses it, or many do with
    asynchronous generators, each with episodes of its own; others may `kill` it."""

    module = "stable_opd_mcore.rollout.environment_worker"

    def __init__(
        self,
        function: UserFunction,
        timeout_seconds: float,
        memory_gib: float,
        log: Path | None = None,
    ) -> None:
        """log: the file to which it appends what the episodes print and raise; None: nowhere."""
        self._function, self._log = function, os.devnull
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            if log.is_file() and log.stat().st_size > _LARGEST_LOG_BYTES:
                log.replace(log.with_suffix(".old.log"))
            self._log = str(log)
        self._timeout_seconds, self._memory_gib = timeout_seconds, memory_gib
        self._killing = threading.Lock()
        self._process, self._channel = start_process(self.module, _SAME_HASHES, leads_group=True)
        self._socket = socket.socket(fileno=os.dup(self._channel.fileno()))  # the same channel
        self.pid = self._process.pid
        self._asking = threading.Lock()
        self._asked: dict[int, Future[bytes]] = {}  # answers that did not come yet
        self._has_ended = self._is_shared = False
        self._reader = threading.Thread(target=self._read, name="answers", daemon=True)
        self._reader.start()
        self.episodes: set[int] = set()  # the numbers of those that it holds
        self.num_opened = 0
        self.has_failed = False  # in an episode

    def load(self) -> None:
        """Let it import the user's file, whose errors are on standard error.

        Raises, as the other methods do:
            EnvironmentFailure: the episode failed, or the process, which has ended then.
        """
        self._limit_seconds = _LONGEST_START_SECONDS
        self._exchange(READY, self._function, self._memory_gib, self._timeout_seconds, self._log)
        self._limit_seconds = self._timeout_seconds
        if self._function.is_async:  # the process itself keeps the limit, unless its loop hangs
            self._limit_seconds += _CLOSING_SECONDS

    def open(self, number: int, row: Any, seed: int) -> Answer:
        """Begin an episode; its first answer."""
        self.num_opened += 1
        self.episodes.add(number)
        return self._answer(number, "open", row, seed)

    def say(self, number: int, text: str, truncated: bool) -> Answer:
        """Give the student's turn to an episode."""
        return self._answer(number, "say", text, truncated)

    def close(self, number: int) -> None:
        """End an episode; nothing happens if this process has none of this number."""
        if number in self.episodes:
            self.episodes.discard(number)
            self._exchange(number, "close")

    def has_ended(self) -> bool:
        """Whether it has."""
        return self._has_ended

    def kill(self) -> None:
        """End the process and its children at once."""
        with self._killing:
            if self._process.returncode is None:  # not reaped: the number is still its own
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()

    def end(self) -> None:
        """End it, after it has closed its generators."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _CLOSING_SECONDS
        state = os.WEXITED | os.WNOWAIT | os.WNOHANG  # without reaping it
        while self._process.returncode is None and time.monotonic() < deadline:
            with suppress(ChildProcessError):  # another thread killed it
                if os.waitid(os.P_PID, self.pid, state) is not None:
                    break
            time.sleep(0.01)
        self.kill()

    def _answer(self, number: int, *message: Any) -> Answer:
        answer = self._exchange(number, *message)
        if answer.is_last:
            self.episodes.discard(number)
        if answer.failure is not None:
            self.has_failed = True
            raise EnvironmentFailure(answer.failure, answer.reason)
        return answer

    def _exchange(self, number: int, *message: Any) -> Answer:
        try:
            answered = self._ask(number, *message)
            return Answer.decoded(answered.result(self._limit_seconds))
        except (BlockingIOError, TimeoutError) as error:
            self._close()
            reason = took_too_long(self._timeout_seconds)
            raise EnvironmentFailure("timeout", reason, self._is_shared) from error
        except (EOFError, OSError) as error:
            self._close()
            reason = how_it_ended(self._process.returncode, self._memory_gib)
            raise EnvironmentFailure("crash", reason, self._is_shared) from error

    def _ask(self, number: int, *message: Any) -> Future[bytes]:
        """Send a message; its answer. Raises BlockingIOError if the process does not read."""
        answered = Future[bytes]()
        with self._asking:
            if self._has_ended:
                raise EOFError
            self._asked[number] = answered
            self._send(*(message if number == READY else (number, *message)))
        return answered

    def _send(self, *message: Any) -> None:
        whole, rest = divmod(self._limit_seconds, 1)
        limit = struct.pack("ll", int(whole), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        send_message(self._channel, message)

    def _read(self) -> None:
        with suppress(EOFError, OSError, ValueError, KeyError):  # at the end; or nonsense
            while True:
                answer = self._channel.recv_bytes(MAX_ANSWER_BYTES)
                number, _, content = answer.partition(b" ")
                self._asked.pop(int(number)).set_result(content)
        with self._asking:
            self._has_ended, self._is_shared = True, len(self._asked) > 1
            self._channel.close()
            self._socket.close()
        for answered in self._asked.values():
            answered.set_exception(EOFError())

    def _close(self) -> None:
        self.kill()
        self._reader.join(_CLOSING_SECONDS)  # a program that it started may keep the channel open
        self.episodes.clear()


class AgentProcess(EnvironmentProcess):
    """A process that plays one agent's episode at a time. `begin` and `wait` are for one thread;
    others may `stop` an episode, also before it begins and after its end."""

    module = "stable_opd_mcore.rollout.agent_worker"

    def begin(self, number: int, row: Any, seed: int, base_url: str) -> None:
        """Let an episode begin. What is wrong with the process, `wait` raises."""
        self._returned = Future[bytes]()
        try:
            self._returned = self._ask(number, row, seed, base_url)
        except (EOFError, OSError) as error:
            self._returned.set_exception(error)

    def wait(self, number: int, seconds_left: Callable[[], float]) -> Answer:
        """What the episode returned.

        seconds_left: for the agent's own work; it is asked again after that time.

        Raises:
            EnvironmentFailure: the episode failed, took too long, or was stopped.
        """
        is_late = False
        try:
            while not wait([self._returned], _CLOSING_SECONDS if is_late else seconds_left()).done:
                if is_late:
                    raise EOFError
                if is_late := seconds_left() <= 0:
                    self.stop(number)
            answer = Answer.decoded(self._returned.result())
        except (EOFError, OSError) as error:
            self._close()
            code = self._process.returncode
            reason = how_it_ended(0 if code is None else code, self._memory_gib)
            raise EnvironmentFailure("timeout" if is_late else "crash", reason) from error
        if answer.failure == "timeout":
            reason = (
                "between a reply, or its beginning, and its next request or its end it took longer "
                f"than environment.timeout_seconds={self._timeout_seconds:g}{answer.reason}"
            )
            raise EnvironmentFailure("timeout", reason)
        if answer.failure is not None:
            raise EnvironmentFailure(answer.failure, answer.reason)
        return answer

    def stop(self, number: int) -> None:
        """End an episode and all that it has started; nothing happens if it does not run."""
        with self._asking, suppress(OSError):  # it has ended, which `wait` notices
            self._send(number)

    def _close(self) -> None:
        self.end()  # which kills the group of its child, too
