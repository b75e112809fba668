"""Workers of a killed process end; a process that has no parent does not."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor

import psutil

from stable_opd_mcore.host.worker_processes import end_with_parent


def pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_workers_end_with_their_parent():
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(2, context, end_with_parent) as pool:
                os.write(write, b" ".join(b"%d" % pid for pid in pool.map(pid_after, [1, 1])))
                pool.submit(pid_after, 60).result()
        finally:
            os._exit(0)
    workers = [psutil.Process(int(pid)) for pid in set(os.read(read, 100).split())]
    assert workers
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert psutil.wait_procs(workers, timeout=20)[1] == []
