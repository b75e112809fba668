"""What a process of an agent does: it imports the user's file once, and forks itself for each
episode.

The child has a process group of its own, in which the user's function and all that it starts run.
The group is killed when the function returns, when the trainer says so, and when the trainer has
ended. Not here: time limits, requests to the student, and which process has which episode
(agents.py).
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn, cast

from stable_opd_mcore.host.user_code import InvalidValueError, UserFunction
from stable_opd_mcore.host.worker_processes import start_user_code
from stable_opd_mcore.rollout.environment_answers import MAX_ANSWER_BYTES, Answer, last_answer
from stable_opd_mcore.rollout.environment_worker import (
    OUT_OF_MEMORY,
    READY,
    described,
    how_it_ended,
    send_answer,
)
from stable_opd_mcore.serving.channel import receive_message

if TYPE_CHECKING:
    from stable_opd_mcore.records import GradingFailure

_POLL_SECONDS = 0.2  # until a child that was killed is noticed
_TAIL_BYTES, _TAIL_LINES, _TAIL_CHARACTERS = 4096, 5, 500
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_Agent = Callable[[dict[str, Any], int, str], object]


def main(file: int) -> None:
    """Play the episodes that the trainer sends, one after another, until its end of the channel
    closes. A message is the number of an episode, and row, seed and URL; only the number stops
    it."""
    channel = Connection(file)
    function, memory_gib, _, log = cast(
        "tuple[UserFunction, float, float, str]", receive_message(channel)
    )
    loaded = start_user_code({"": function}, memory_gib, log=log)[""]
    if log == os.devnull:  # its last lines belong to an error nevertheless
        with tempfile.TemporaryFile() as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
    with suppress(EOFError, OSError):
        send_answer(channel, READY, Answer())
        while True:
            number, *arguments = receive_message(channel)
            if arguments:
                answer = _play(channel, number, loaded, function.path, memory_gib, *arguments)
                send_answer(channel, number, answer)


def _play(
    channel: Connection,
    number: int,
    function: _Agent,
    file: str,
    memory_gib: float,
    *arguments: Any,
) -> Answer:
    """One episode in a child. Raises EOFError or OSError if the trainer has ended."""
    printed = os.fstat(2).st_size
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        channel.close()
        os.close(reading)
        _run(Connection(writing, readable=False), function, file, printed, *arguments)
    os.close(writing)
    with suppress(OSError):
        os.setpgid(child, child)  # the child does it too: whoever is first
    result, watched = Connection(reading, writable=False), [channel, reading]
    answer: Answer | None = None
    try:
        while answer is None:
            has_ended = _has_ended(child)
            ready, _, _ = select.select(watched, [], [], 0 if has_ended else _POLL_SECONDS)
            if reading in ready:
                watched.remove(reading)
                with suppress(EOFError):  # without a result
                    answer = Answer.decoded(result.recv_bytes(MAX_ANSWER_BYTES))
            elif channel in ready and receive_message(channel) == (number,):
                answer = _failed("timeout", _tail(printed))
            elif has_ended:
                code = os.waitstatus_to_exitcode(_killed(child))
                answer = _failed("crash", how_it_ended(code, memory_gib) + _tail(printed))
    finally:
        _killed(child)
        result.close()
    return answer


def _has_ended(child: int) -> bool:
    """Whether it has, without reaping it: its number stays that of its group."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _killed(child: int) -> int:
    """Its status, after an end of its whole group; 0 if it was reaped before."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]
    return 0


def _run(
    result: Connection,
    function: _Agent,
    file: str,
    printed: int,
    row: Mapping[str, Any],
    seed: int,
    base_url: str,
) -> NoReturn:
    """Run the function in the child, and send what it returned."""
    own = os.getpid()
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGTERM, _stay)  # a handler: programs that it starts get the default
    try:
        returned = function(dict(row), seed, base_url)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        answer = last_answer(returned)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except InvalidValueError as error:
        answer = _failed("invalid", str(error))
    except Exception as error:  # the user's code may raise anything
        answer = _failed("crash", described(error, file) + _tail(printed))
        traceback.print_exc()  # to the log
    except BaseException:
        os._exit(1)
    with suppress(OSError):
        sys.stdout.flush()
    if os.getpid() != own:  # the user's function has forked: the parent answers
        os._exit(0)
    result.send_bytes(answer.encoded())
    os._exit(0)


def _stay(*_: object) -> None:
    """Slurm sends SIGTERM to every process of a job step; the trainer still finishes its step."""


def _failed(failure: GradingFailure, reason: str) -> Answer:
    return Answer(reward=0.0, failure=failure, reason=reason)


def _tail(begin: int) -> str:
    """The last lines in the log after its first `begin` bytes, as the end of a sentence."""
    with open("/proc/self/fd/2", "rb") as log:
        log.seek(max(begin, os.fstat(2).st_size - _TAIL_BYTES))
        text = log.read().decode(errors="replace").strip()
    lines = "\n".join(text.splitlines()[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
    return f"; it printed at last:\n{lines}" if lines else ""
