"""Stop at the scheduler's or the user's request: all ranks after the same step, with a checkpoint.

slurm/ announces the end of a job with SIGUSR1: the run exits with code 0. Slurm itself and others
end it with SIGTERM: code 143. In both cases its caller writes REQUEUE. The user presses Ctrl-C
(SIGINT): the run exits with code 130, and a second Ctrl-C ends it at once. A signal reaches each
process at a slightly different time, so the ranks agree by one all-reduce a step. `srun` does not
pass on the exit codes of its ranks, so a run reports its outcome in a file: REQUEUE or DONE.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.run_directory import DONE, REQUEUE


class StopReason(IntEnum):
    """Why to stop; the larger one wins where ranks received different signals."""

    NONE = 0
    REQUEUE = 1  # SIGUSR1
    TERMINATE = 2  # SIGTERM
    INTERRUPT = 3  # SIGINT

    @property
    def requeues(self) -> bool:
        """Whether a batch job that was stopped this way is started again."""
        return self in (StopReason.REQUEUE, StopReason.TERMINATE)


class Stopped(SystemExit):
    """Ends the program although steps remain; `checkpoint` holds `step`."""

    def __init__(self, step: int, reason: StopReason, checkpoint: Path | None):
        super().__init__(_EXIT_CODES[reason])
        self.step = step
        self.reason = reason
        self.checkpoint = checkpoint

    def text(self) -> str:
        """What stopped the run, what is saved, and how it continues."""
        by = {StopReason.REQUEUE: "SIGUSR1", StopReason.TERMINATE: "SIGTERM"}
        return (
            f"stopped by {by.get(self.reason, 'Ctrl-C')} after step {self.step}; checkpoint: "
            f"{self.checkpoint}. The same command resumes there."
        )


_EXIT_CODES = {
    StopReason.REQUEUE: 0,
    StopReason.TERMINATE: 128 + signal.SIGTERM,
    StopReason.INTERRUPT: 128 + signal.SIGINT,
}


class StopSignals:
    """Records SIGUSR1, SIGTERM and SIGINT inside the block.

    SIGUSR1 is also blocked in this thread, and child processes inherit that. Slurm may signal every
    process of a step, and a killed grading worker would change the rewards.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = device  # where the default group's tensors live
        self._reason = StopReason.NONE
        self._handlers: dict[signal.Signals, Any] = {}
        self._mask: set[int] = set()
        self.finish_step_first = False  # SIGINT waits for the step's end; else it interrupts

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._record)
        self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._record_interrupt)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        return self

    def __exit__(self, *exception: object) -> None:
        # Unblock first: a pending SIGUSR1 must reach our handler, because the default one kills.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def requested(self) -> StopReason:
        """Why this rank has been asked to stop; NONE (false) without a signal."""
        pending = signal.SIGUSR1 in signal.sigpending()
        return max(self._reason, StopReason.REQUEUE if pending else StopReason.NONE)

    def requested_on_any_rank(self) -> StopReason:
        """The largest reason of all ranks. A collective: the same answer on every rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.requested()
        reason = torch.tensor([int(self.requested())], device=self._device)
        dist.all_reduce(reason, op=dist.ReduceOp.MAX)
        return StopReason(int(reason.item()))

    def _record(self, number: int, _frame: FrameType | None) -> None:
        by_term = number == signal.SIGTERM
        reason = StopReason.TERMINATE if by_term else StopReason.REQUEUE
        self._reason = max(self._reason, reason)

    def _record_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self.finish_step_first or self._reason == StopReason.INTERRUPT:
            raise KeyboardInterrupt
        self._reason = StopReason.INTERRUPT
        if not dist.is_initialized() or dist.get_rank() == 0:
            os.write(2, b"\nCtrl-C: finishing this step and saving; again: end at once\n")


@contextmanager
def shielded() -> Iterator[None]:
    """Block SIGTERM and SIGINT until the end of the block; processes started inside never get them.

    For checkpoints: a signal to every process of a step would end their writers.
    """
    resource_tracker.ensure_running()  # multiprocessing unblocks them when it starts the tracker
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def clear_outcome(run_directory: Path) -> None:
    for name in (REQUEUE, DONE):
        (run_directory / name).unlink(missing_ok=True)


def write_outcome(run_directory: Path, name: str, step: int | None) -> None:
    """Rank 0 writes the file `name`, REQUEUE or DONE; no rank returns before it exists.

    Args:
        step: the last checkpoint's, which must be complete; None for an evaluation.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        write_atomically(run_directory / name, json.dumps({"step": step}).encode())
    if dist.is_initialized():
        dist.barrier()
