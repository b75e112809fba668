"""How long the phases of a step take, how many tokens a second that makes, and peak memory.

Not a profiler: wall-clock seconds of the named phases, nothing inside them.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stable_opd_mcore.metrics import Max, Mean, Metrics


class PhaseTimer:
    """Times one step.

        timer = PhaseTimer(device)
        with timer.phase("rollout"): ...
        metrics = timer.metrics(num_tokens)

    The step starts when the timer is made and ends with `metrics`. A phase entered twice adds up.
    On a CUDA device a phase ends when its kernels have ended. Reduced over ranks, times are those
    of the slowest rank.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self._seconds: dict[str, float] = {}
        self._start = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to `time/<name>`, also when it ends in an exception."""
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def metrics(self, num_tokens: int) -> Metrics:
        """`time/<phase>` and `time/total` in seconds, tokens a second, peak memory.

        `num_tokens`: prompt and response tokens of the step's global batch; every rank gives the
        same number, and the rate is over the ranks' mean step time.
        """
        total = self._now() - self._start
        times = {f"time/{name}": Max(seconds) for name, seconds in self._seconds.items()}
        return Metrics(
            {
                **times,
                "time/total": Max(total),
                "throughput/tokens_per_second": Mean(num_tokens, total),
                "memory/peak_gib": Max(peak_memory_gib(self._device)),
            }
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def peak_memory_gib(device: torch.device | str = "cpu") -> float:
    """Peak memory of this process since its start, in GiB.

    On a CUDA device: what PyTorch allocated there. Otherwise: resident memory, libraries included.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB elsewhere
