"""Stopping when the scheduler asks: all ranks after the same step, with a checkpoint and a marker.

    with StopSignals(device) as stop:
        for each step:
            ...
            if stop.asked_on_any_rank():
                ...save a checkpoint...
                raise Stopped(state.step)      # whoever started the loop calls leave_for_requeue

Slurm announces a time limit or a preemption with SIGUSR1 or SIGTERM, to each process at a slightly
different moment; the ranks therefore agree by one all-reduce a step. An exit code does not survive
`srun`, so the verdict is a file. Not here: who starts the run again (slurm/common.sh), and hangs
(watchdog.py).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from stable_opd_mcore.atomic_files import write_atomically

# In the run directory: stopped between two steps, checkpoint complete, start again.
MARKER = "REQUEUE"


class Stopped(SystemExit):
    """The program ends well (code 0), its work unfinished, from however deep it is raised."""

    def __init__(self, step: int):
        super().__init__(0)
        self.step = step


class StopSignals:
    """Notes SIGUSR1 and SIGTERM while the block lasts, then puts back what stood before.

    SIGUSR1 is also blocked in this thread: the processes it starts inherit that, and live on where
    Slurm signals every process of a step (a killed grading worker would change the rewards).
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = device  # where the default group's backend wants its tensors
        self._noted = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._mask: set[int] = set()

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._note)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The mask first: a pending SIGUSR1 then meets our handler, not the default that kills.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether this rank was signalled by now."""
        return self._noted or signal.SIGUSR1 in signal.sigpending()

    def asked_on_any_rank(self) -> bool:
        """Whether some rank was signalled by now; every rank must call it, all get one answer."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.asked()
        flag = torch.tensor([int(self.asked())], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._noted = True


@contextmanager
def shielded() -> Iterator[None]:
    """SIGTERM waits until the end of the block, and the processes started in it never get it.

    For checkpoints: they keep a helper process that starts with the first one, and Megatron cannot
    save again when Slurm's SIGTERM to every process of a step has ended that helper.
    """
    resource_tracker.ensure_running()  # multiprocessing unblocks SIGTERM when it starts this one
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def clear_marker(run_directory: Path) -> None:
    """A run that starts again is not stopped any more. Rank 0 calls it before the first step."""
    (run_directory / MARKER).unlink(missing_ok=True)


def leave_for_requeue(run_directory: Path, step: int) -> None:
    """Rank 0 writes the marker; no rank goes before it stands. Call after the checkpoint of `step`
    is complete.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        write_atomically(run_directory / MARKER, json.dumps({"step": step}).encode())
    if dist.is_initialized():
        dist.barrier()
