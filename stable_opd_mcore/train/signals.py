"""Stop at the scheduler's request: all ranks after the same step, with a checkpoint.

    with StopSignals(device) as stop:
        for each step:
            ...
            if stop.requested_on_any_rank():
                ...save a checkpoint...
                raise Stopped(state.step)      # the caller of the loop then writes REQUEUE

Slurm announces a time limit or a preemption with SIGUSR1 or SIGTERM. The signal reaches each
process at a slightly different time, so the ranks agree by one all-reduce a step. `srun` does not
pass on the exit codes of its ranks, so a run reports its outcome in a file: REQUEUE or DONE.
Not here: starting the run again (slurm/common.sh), and hangs (watchdog.py).
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

# Files in the run directory; each holds {"step": N}.
REQUEUE = "REQUEUE"  # stopped between two steps with a complete checkpoint; start it again
DONE = "DONE"  # reached its end; all results are written


class Stopped(SystemExit):
    """Ends the program with exit code 0 although steps remain."""

    def __init__(self, step: int):
        super().__init__(0)
        self.step = step


class StopSignals:
    """Records SIGUSR1 and SIGTERM inside the block; restores the earlier handlers at its end.

    SIGUSR1 is also blocked in this thread, and child processes inherit that. Slurm may signal every
    process of a step, and a killed grading worker would change the rewards.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = device  # of the default group's tensors
        self._received = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._mask: set[int] = set()

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._record)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Unblock first: a pending SIGUSR1 must reach our handler, because the default one kills.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether this rank has received a signal."""
        return self._received or signal.SIGUSR1 in signal.sigpending()

    def requested_on_any_rank(self) -> bool:
        """Whether any rank has received a signal. A collective: the same answer on every rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.requested()
        flag = torch.tensor([int(self.requested())], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _record(self, _number: int, _frame: FrameType | None) -> None:
        self._received = True


@contextmanager
def shielded() -> Iterator[None]:
    """Block SIGTERM until the end of the block; processes started inside never receive it.

    For checkpoints: the first one starts a helper process that later ones use. Slurm's SIGTERM to
    every process of a step would end that helper, and Megatron could not save again.
    """
    resource_tracker.ensure_running()  # multiprocessing unblocks SIGTERM when it starts the tracker
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def clear_outcome(run_directory: Path) -> None:
    """Remove the outcome of an earlier start. Rank 0 calls it before the first step."""
    for name in (REQUEUE, DONE):
        (run_directory / name).unlink(missing_ok=True)


def write_outcome(run_directory: Path, name: str, step: int | None) -> None:
    """Rank 0 writes the file `name`, REQUEUE or DONE; no rank returns before it exists.

    Args:
        step: of the last checkpoint, which must be complete; None for an evaluation.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        write_atomically(run_directory / name, json.dumps({"step": step}).encode())
    if dist.is_initialized():
        dist.barrier()
