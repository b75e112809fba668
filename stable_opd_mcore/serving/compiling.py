"""Whether SGLang servers of this machine compile kernels: such a server is silent, but not hung.

With empty caches a server compiles for minutes, at its start and at the first request of a new
kind. The servers of a machine share the caches: one compiles, the others wait for its lock. So the
compilers under all of them are watched. Not here: what follows for a server (process.py,
rollout/sglang/fleet.py).
"""

from __future__ import annotations

import psutil

from stable_opd_mcore.serving.command import PROGRAM

_COMPILERS = {"ninja", "nvcc", "cicc", "cudafe++", "ptxas", "fatbinary", "nvlink"}  # CUDA's
_COMPILERS |= {"c++", "g++", "gcc", "cc1", "cc1plus", "as", "ld", "collect2"}


class CompilerWatch:
    """Compares the compilers' CPU time with that of the call before."""

    def __init__(self) -> None:
        self._seconds = compiler_seconds()

    def has_compiled(self) -> bool:
        """Whether a compiler has worked since the last call. One that only waits has not."""
        before, self._seconds = self._seconds, compiler_seconds()
        return any(before.get(pid) != seconds for pid, seconds in self._seconds.items())


def compiler_seconds() -> dict[int, float]:
    """Process id -> seconds of CPU time, of the compilers that servers of this machine started."""
    seconds = {}
    for process in psutil.process_iter():
        try:
            if process.name() in _COMPILERS and any(map(_is_server, process.parents())):
                used = process.cpu_times()
                seconds[process.pid] = used.user + used.system
        except psutil.Error:
            continue  # it has ended meanwhile, or is another user's
    return seconds


def _is_server(process: psutil.Process) -> bool:
    return str(PROGRAM) in process.cmdline()
