"""The store at which a launcher's ranks meet before they form a process group.

Each rank writes a hash of its settings to `arrived/RANK` and waits for the others, so that a rank
can be named that is absent or was started with other settings.
"""

# pyright: reportPrivateImportUsage=false

import hashlib
import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.network import gloo_settings

_log = logging.getLogger(__name__)
_LOG_AFTER = timedelta(seconds=15)
_LOOK_EVERY = timedelta(seconds=5)
_READ_WITHIN = timedelta(seconds=20)
_NO_SETTINGS: Mapping[str, Any] = {}
_LOST_RANK = ("gloo/transport", "remote process exited")  # in messages of gloo and NCCL
_meetings = itertools.count()  # a store may outlive a meeting
_OF_LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE")
_REMEDY = (
    f"start with torchrun or a script in slurm/, or unset {', '.join(_OF_LAUNCHER)} for one process"
)
_LEAST_OF_SEVERAL = {  # variables that only tasks started together have with this value or more
    "SLURM_STEP_NUM_TASKS": 2,  # srun's; SLURM_NTASKS is also set where nothing was started yet
    "SLURM_PROCID": 1,
    "OMPI_COMM_WORLD_SIZE": 2,
    "PMI_SIZE": 2,
}


def is_launched() -> bool:
    """Whether a launcher has started this rank; a lone process is not.

    Raises:
        UserError: one task of several, whose launcher does not number the ranks.
    """
    if any(name in os.environ for name in _OF_LAUNCHER):
        return True
    found = {name: os.environ.get(name, "") for name in _LEAST_OF_SEVERAL}
    several = {
        name: text
        for name, text in found.items()
        if text.isdecimal() and int(text) >= _LEAST_OF_SEVERAL[name]
    }
    if several:
        raise UserError(
            f"{', '.join(map('='.join, several.items()))}, but RANK and WORLD_SIZE are not set: "
            "each of these tasks would be a run of one rank, all in one directory; start them with "
            f"torchrun or a script in slurm/, or unset {' and '.join(several)} for one process"
        )
    return False


def meet(
    timeout: timedelta, settings: Mapping[str, Any] = _NO_SETTINGS
) -> tuple[dist.Store, int, int]:
    """Wait for every rank; returns the common store, this rank and the number of ranks.

    Args:
        timeout: the longest wait; it ends after a third of this time in which no rank has come.
        settings: what must be the same on all ranks, by its name, as JSON has it.

    Raises:
        UserError: a variable of the launcher is missing or unusable, or a rank did not start or has
            other settings.
    """
    world_size = launcher_number("WORLD_SIZE", 1, 2**31)
    rank = launcher_number("RANK", 0, world_size - 1)
    if "LOCAL_WORLD_SIZE" in os.environ:
        launcher_number("LOCAL_WORLD_SIZE", 1, world_size)
    host, port = os.environ.get("MASTER_ADDR", ""), launcher_number("MASTER_PORT", 1, 2**16 - 1)
    try:
        os.environ.update(gloo_settings(host))
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={host!r} of the launcher: {error}; expected the name or address of rank "
            f"0's machine: {_REMEDY}"
        ) from None
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait(partial(_absent_server, host, port), timeout)
    try:
        server = dist.TCPStore(
            host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        # torchrun's agent keeps one store for all its restarts
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}.{next(_meetings)}", server)
        text = json.dumps(settings, sort_keys=True)
        store.set(f"settings/{rank}", text)
        store.add("arrivals", 1)
        store.set(f"arrived/{rank}", hashlib.sha256(text.encode()).hexdigest())
        _wait(partial(_absent_ranks, store, world_size, timeout / 3), timeout)
        _refuse_other_settings(store, rank, world_size)
    except dist.DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"rank {rank} cannot {'serve' if serves else 'reach'} the ranks' store at MASTER_ADDR:"
            f"MASTER_PORT={host}:{port}: {reason}; see the log of rank 0, or set another port"
        ) from None
    return store, rank, world_size


def _refuse_other_settings(store: dist.Store, rank: int, world_size: int) -> None:
    """Raise the same UserError on all ranks if they have different settings."""
    hashes = store.multi_get([f"arrived/{each}" for each in range(world_size)])
    others = [each for each in range(world_size) if hashes[each] != hashes[0]]
    if not others:
        return
    first, other = (json.loads(store.get(f"settings/{each}")) for each in (0, others[0]))
    keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # it may hold the store, which the other ranks still read
        with suppress(dist.DistStoreError):
            store.wait([f"read/{each}" for each in range(world_size)], _READ_WITHIN)
    differ = ", ".join(f"{key}={other.get(key)} (rank 0: {first.get(key)})" for key in keys[:8])
    raise UserError(
        f"rank {others[0]} of {world_size} was started with other settings than rank 0: {differ}; "
        "start every rank with the same config and overrides"
    )


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise a UserError where a collective fails because another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _LOST_RANK):
            raise
        raise UserError(
            f"rank {dist.get_rank()} has lost another rank, which ended or cannot be reached any "
            "more: see the end of the other ranks' logs for the cause, and start again; the run "
            f"continues from its newest checkpoint ({str(error).partition(' This is ')[0]:.300})"
        ) from error


def launcher_number(name: str, lowest: int, highest: int) -> int:
    """The number in a variable of the launcher; a UserError if there is none in this range."""
    text = os.environ.get(name, "")
    if text.isdecimal() and lowest <= int(text) <= highest:
        return int(text)
    raise UserError(
        f"{name}={text!r} of the launcher; expected a number from {lowest} to {highest}: {_REMEDY}"
    )


def _wait(absent: Callable[[timedelta], str], timeout: timedelta) -> None:
    """Wait for what `absent` finds missing within a time: log it once, then raise."""
    if who := absent(_LOG_AFTER):
        _log.warning("%s; waiting up to %s", who, timeout)
        if who := absent(timeout - _LOG_AFTER):
            raise UserError(
                f"{who} within {timeout}, or within {timeout / 3} after the last that did "
                "(fault.start_minutes and a third of it); look for the cause in their logs, and "
                "start every rank with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )


def _absent_server(host: str, port: int, patience: timedelta) -> str:
    """Torch's own client would log a C++ stack for each failure."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return ""
        except OSError as error:
            if time.monotonic() > deadline:
                return f"rank 0 has not started: nothing listens at {host}:{port} ({error})"
        time.sleep(0.2)


def _absent_ranks(store: dist.Store, world_size: int, quiet: timedelta, patience: timedelta) -> str:
    """The ranks that are absent after `patience`, or when none has come for the time `quiet`."""
    keys = [f"arrived/{rank}" for rank in range(world_size)]
    arrived, last = 0, time.monotonic()
    deadline = last + patience.total_seconds()
    while (now := time.monotonic()) < min(deadline, last + quiet.total_seconds()):
        with suppress(dist.DistStoreError):
            store.wait(keys, min(_LOOK_EVERY, timedelta(seconds=deadline - now), quiet / 4))
            return ""
        if arrived != (arrived := store.add("arrivals", 0)):
            last = time.monotonic()
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    names = ", ".join(missing[:16]) + (", ..." if missing[16:] else "")
    return f"{len(missing)} of {world_size} ranks have not started: {names}" if missing else ""
