"""Processes that work for another one and end when it ends; some run the user's code."""

import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from stable_opd_mcore.host.user_code import UserFunction

LOADING_SECONDS = 150  # for the import of a user's file, with all that it imports
_PROGRAM = (
    "import sys; from importlib import import_module; sys.path[:] = sys.argv[3:]; "
    "import_module(sys.argv[1]).main(int(sys.argv[2]))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy would start more


def end_with_parent() -> None:
    """End this process once its parent has ended, even by a signal that cannot be caught.

    For processes that `multiprocessing` started; nothing happens in others. Nothing is cleaned up:
    the process ends as by SIGKILL, with exit code 1.
    """
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def start_process(
    module: str, variables: Mapping[str, str], leads_group: bool = False
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that runs `main(file)` of a module, where `file` is the number of its end of
    a channel. Return the process and our end. It has one thread for numpy.

    Args:
        variables: its environment variables, in addition to those of this process.
        leads_group: it gets a process group of its own, whose signals end its children too.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        file = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, module, str(file), *sys.path],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD, **variables},
            pass_fds=[file],
            process_group=0 if leads_group else None,
        )
    return process, Connection(ours.detach())


def set_future(future: Future[Any], result: Any) -> None:
    """Give a future its result, or raise it there if it is an error; not if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def start_user_code(
    functions: Mapping[str, UserFunction],
    memory_gib: float,
    warm_up: Callable[[], object] = lambda: None,
    log: str = os.devnull,
) -> dict[str, Callable[..., Any]]:
    """Import the user's functions in this process, which from then on has `memory_gib` of address
    space and writes to the file `log` what it prints.

    The import may still print to the terminal, and one that takes more than LOADING_SECONDS ends
    the process. SIGTERM is ignored: Slurm sends it to every process of a job step, and the trainer
    still finishes its training step.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    warm_up()
    signal.setitimer(signal.ITIMER_REAL, LOADING_SECONDS)  # it ends the process
    loaded = {
        name: function.load(stays=len(functions) == 1) for name, function in functions.items()
    }
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.freeze()  # collections need not visit the objects of what was imported
    gc.set_threshold(50_000)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    limit = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return loaded
