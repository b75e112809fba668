"""Wall-clock time of a step and its phases, tokens per second, and peak memory.

Not a profiler: it measures the named phases and nothing inside them.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from stable_opd_mcore.metrics import Max, Mean, Metrics
from stable_opd_mcore.serving.idle_clock import IdleClock


class PhaseTimer:
    """Times one step.

    The step starts when the timer is created and ends with `metrics`. The times of a phase that is
    entered twice add up. On a CUDA device a phase ends when its kernels have ended; events in the
    device's queue measure that, and the host waits for them only in `metrics`. Reduced over ranks,
    times are those of the slowest rank.

    Args:
        on_phase: gets the name of each phase that begins.
        idle: metric -> a clock of the servers; they measure the same time as this timer.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        on_phase: Callable[[str], object] = lambda _: None,
        idle: Mapping[str, IdleClock] | None = None,
    ):
        self._device = torch.device(device)
        self._on_phase = on_phase
        self._idle = idle or {}
        for clock in self._idle.values():
            clock.restart()
        self._phases: list[tuple[str, Any, Any]] = []  # name, start, end
        self._start = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `time/<name>`, even if it raises."""
        self._on_phase(name)
        with self.part(name):
            yield

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Like `phase`, for a block inside a phase; `on_phase` is not called."""
        start = self._now()
        try:
            yield
        finally:
            self._phases.append((name, start, self._now()))

    def metrics(self, num_tokens: int) -> Metrics:
        """`time/<phase>` and `time/total` in seconds, tokens per second, peak memory.

        With a part "wait", in which the trainer waits for responses of servers: also the share of
        the step spent there and in "sync", while servers take the weights. With clocks: also the
        share of the step in which the servers are idle.

        `num_tokens` counts the prompt and response tokens of the step's global batch and is the
        same on every rank. The rate divides it by the ranks' mean step time.
        """
        end = self._now()
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        total = _seconds(self._start, end)
        seconds: dict[str, float] = {}
        for name, start, stop in self._phases:
            seconds[name] = seconds.get(name, 0.0) + _seconds(start, stop)
        times = {f"time/{name}": Max(value) for name, value in seconds.items()}
        waited: dict[str, Mean] = {}
        if "wait" in seconds:
            waited["perf/trainer_waited"] = Mean(seconds["wait"] + seconds.get("sync", 0.0), total)
        return Metrics(
            {
                **times,
                **waited,
                **{key: clock.idle_share() for key, clock in self._idle.items()},
                "time/total": Max(total),
                "throughput/tokens_per_second": Mean(num_tokens, total),
                "memory/peak_gib": Max(peak_memory_gib(self._device)),
            }
        )

    def _now(self) -> Any:
        """A moment of this timer: seconds, or an event in the queue of a CUDA device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(start: Any, end: Any) -> float:
    """Between two moments of one timer, which have passed."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def peak_memory_gib(device: torch.device | str = "cpu") -> float:
    """Peak memory of this process since its start, in GiB.

    On a CUDA device: memory allocated by PyTorch. Otherwise: resident memory, libraries included.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB
