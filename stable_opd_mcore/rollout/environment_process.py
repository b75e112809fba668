"""The trainer's end of a process that holds episodes (environment_worker.py) or plays one agent's
after another (agent_worker.py)."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.user_code import UserFunction
from stable_opd_mcore.host.worker_processes import start_process
from stable_opd_mcore.records import GradingFailure
from stable_opd_mcore.rollout.environment_worker import MAX_ANSWER_BYTES, Answer, how_it_ended
from stable_opd_mcore.serving.channel import send_message

_LONGEST_START_SECONDS = 180.0  # the process itself limits the import of the user's file
_LARGEST_LOG_BYTES = 16 * 2**20  # of a file to which another process appends
_CLOSING_SECONDS = 10.0  # the process itself takes half of it
_SAME_HASHES = {"PYTHONHASHSEED": "0"}  # sets have the same order in each process


class EnvironmentFailure(Exception):
    """An answer or the start failed; the text says how."""

    def __init__(self, failure: GradingFailure, reason: str) -> None:
        super().__init__(reason)
        self.failure: GradingFailure = failure


def cannot_start(function: UserFunction) -> UserError:
    """For a function whose first process fails as it starts."""
    return UserError(
        f"{function.path}: running it fails, or takes more than a minute; fix the error above"
    )


class EnvironmentProcess:
    """A process that starts now; `load` waits for it. One thread uses it; others may `kill` it."""

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
        self.pid = self._process.pid
        self.episodes: set[int] = set()  # the numbers of those that it holds
        self.num_opened = 0
        self.has_failed = False  # in an episode

    def load(self) -> None:
        """Let it import the user's file, whose errors are on standard error.

        Raises, as the other methods do:
            EnvironmentFailure: the episode failed, or the process, which has ended then.
        """
        self._set_limit(_LONGEST_START_SECONDS)
        orphan_seconds = 2 * self._timeout_seconds + 10
        self._exchange((self._function, self._memory_gib, orphan_seconds, self._log))
        self._set_limit(self._timeout_seconds)

    def open(self, number: int, row: Any, seed: int) -> Answer:
        """Begin an episode; its first answer."""
        self.num_opened += 1
        self.episodes.add(number)
        return self._answer(number, ("open", number, row, seed))

    def say(self, number: int, text: str, truncated: bool) -> Answer:
        """Give the student's turn to an episode."""
        return self._answer(number, ("say", number, text, truncated))

    def close(self, number: int) -> None:
        """End an episode; nothing happens if this process has none of this number."""
        if number in self.episodes:
            self.episodes.discard(number)
            self._exchange(("close", number))

    def has_ended(self) -> bool:
        """Whether it has ended while no answer was asked for."""
        return self._channel.closed or self._channel.poll(0)

    def kill(self) -> None:
        """End the process and its children at once."""
        with self._killing:
            if self._process.returncode is None:  # not reaped: the number is still its own
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()

    def end(self) -> None:
        """End it, after it has closed its generators."""
        self._channel.close()
        deadline = time.monotonic() + _CLOSING_SECONDS
        state = os.WEXITED | os.WNOWAIT | os.WNOHANG  # without reaping it
        while self._process.returncode is None and time.monotonic() < deadline:
            with suppress(ChildProcessError):  # another thread killed it
                if os.waitid(os.P_PID, self.pid, state) is not None:
                    break
            time.sleep(0.01)
        self.kill()

    def _answer(self, number: int, message: tuple[Any, ...]) -> Answer:
        answer = self._exchange(message)
        if answer.is_last:
            self.episodes.discard(number)
        if answer.failure is not None:
            self.has_failed = True
            raise EnvironmentFailure(answer.failure, answer.reason)
        return answer

    def _exchange(self, message: tuple[Any, ...]) -> Answer:
        try:
            send_message(self._channel, message)
            return Answer.decoded(self._channel.recv_bytes(MAX_ANSWER_BYTES))
        except BlockingIOError as error:
            self._close()
            reason = (
                f"an answer took longer than environment.timeout_seconds={self._timeout_seconds:g}"
            )
            raise EnvironmentFailure("timeout", reason) from error
        except (EOFError, OSError) as error:
            self._close()
            reason = how_it_ended(self._process.returncode, self._memory_gib)
            raise EnvironmentFailure("crash", reason) from error

    def _close(self) -> None:
        self.kill()
        self._channel.close()
        self.episodes.clear()

    def _set_limit(self, seconds: float) -> None:
        """Let reads and writes of the channel fail with BlockingIOError after this time."""
        whole, rest = divmod(seconds, 1)
        limit = struct.pack("ll", int(whole), int(rest * 1e6))
        with socket.socket(fileno=os.dup(self._channel.fileno())) as end:  # the option is shared
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class AgentProcess(EnvironmentProcess):
    """A process that plays one agent's episode at a time. `begin` and `wait` are for one thread;
    others may `stop` an episode, also before it begins and after its end."""

    module = "stable_opd_mcore.rollout.agent_worker"

    def __init__(self, *settings: Any) -> None:
        """See `EnvironmentProcess`."""
        super().__init__(*settings)
        self._sending = threading.Lock()

    def begin(self, number: int, row: Any, seed: int, base_url: str) -> None:
        """Let an episode begin. What is wrong with the process, `wait` raises."""
        self._send(number, row, seed, base_url)

    def wait(self, number: int, seconds_left: Callable[[], float]) -> Answer:
        """What the episode returned.

        seconds_left: for the agent's own work; it is asked again after that time.

        Raises:
            EnvironmentFailure: the episode failed, took too long, or was stopped.
        """
        is_late = False
        try:
            while not self._channel.poll(_CLOSING_SECONDS if is_late else seconds_left()):
                if is_late:
                    raise EOFError
                if is_late := seconds_left() <= 0:
                    self.stop(number)
            answer = Answer.decoded(self._channel.recv_bytes(MAX_ANSWER_BYTES))
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
        self._send(number)

    def _send(self, *message: Any) -> None:
        with self._sending, suppress(OSError):  # it has ended, which `wait` notices
            send_message(self._channel, message)

    def _close(self) -> None:
        self.end()  # which kills the group of its child, too
