"""The store at which a launcher's ranks meet before they form a process group.

Rank 0 serves it at MASTER_ADDR:MASTER_PORT, or torchrun's agent does. Each rank writes
`arrived/RANK` and waits for the others, so that a rank which never starts can be named.
"""

# pyright: reportPrivateImportUsage=false

import logging
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.network import gloo_settings

_log = logging.getLogger(__name__)

_REMEDY = "start with torchrun or srun, or unset RANK and WORLD_SIZE for one process"


def meet(
    timeout: timedelta, log_after: timedelta = timedelta(seconds=30)
) -> tuple[dist.Store, int, int]:
    """Wait for every rank; returns the common store, this rank and the number of ranks.

    Raises:
        UserError: a variable of the launcher is missing or unusable, or a rank did not start.
    """
    world_size = _number("WORLD_SIZE", 1, 2**31)
    rank = _number("RANK", 0, world_size - 1)
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 1, 2**16 - 1)
    try:
        os.environ.update(gloo_settings(host))
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={host!r} of the launcher is not usable: {error}; expected the name or "
            f"address of rank 0's machine: {_REMEDY}"
        ) from None
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait_for_server(host, port, timeout, log_after)
    try:
        server = dist.TCPStore(
            host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        # torchrun's agent keeps one store for all its restarts
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", server)
        _wait_for_ranks(store, rank, world_size, timeout, log_after)
    except dist.DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"rank {rank} cannot {'serve' if serves else 'reach'} the ranks' store at MASTER_ADDR:"
            f"MASTER_PORT={host}:{port}: {reason}; see the log of rank 0, or set another port"
        ) from None
    return store, rank, world_size


def _number(name: str, lowest: int, highest: int) -> int:
    text = os.environ.get(name, "")
    if text.isdecimal() and lowest <= int(text) <= highest:
        return int(text)
    raise UserError(
        f"{name}={text!r} of the launcher; expected a number from {lowest} to {highest}: {_REMEDY}"
    )


def _wait_for_server(host: str, port: int, timeout: timedelta, log_after: timedelta) -> None:
    """Wait until rank 0 listens. Torch's own client would log a C++ stack for each failure."""
    start, logged = time.monotonic(), False
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            absent = f"rank 0 has not started: nothing listens at {host}:{port} ({error})"
        waited = timedelta(seconds=time.monotonic() - start)
        if waited > timeout:
            raise _did_not_start(absent, timeout)
        if waited > log_after and not logged:
            _log.warning("%s; waiting up to %s", absent, timeout)
            logged = True
        time.sleep(0.2)


def _wait_for_ranks(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, log_after: timedelta
) -> None:
    keys = [f"arrived/{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    absent = ""
    for patience in (log_after, timeout - log_after):
        try:
            return store.wait(keys, patience)
        except dist.DistStoreError:
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
        if not missing:
            return
        names = ", ".join(map(str, missing[:16])) + (", ..." if missing[16:] else "")
        absent = f"{len(missing)} of {world_size} ranks have not started: rank {names}"
        if patience == log_after and rank == min({*range(world_size)} - {*missing}):
            _log.warning("%s; waiting up to %s", absent, timeout)
    raise _did_not_start(absent, timeout)


def _did_not_start(absent: str, timeout: timedelta) -> UserError:
    return UserError(
        f"{absent} within {timeout}; look for the cause in their logs, and start every rank with "
        "the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )
