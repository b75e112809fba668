"""The trainer's end of a process group that it shares with SGLang servers: where it waits for them,
and how it joins.

Not here: what is sent over the group, and who is in it (transports.py).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.network import address_towards
from stable_opd_mcore.serving.process import is_loopback


def listen(host: str | None, urls: Sequence[str]) -> socket.socket:
    """A socket on this machine's address `host`, None: on the one on the way to the servers.

    Raises:
        UserError: `host` is no address of this machine.
        OSError: no way leads to a server, or its name is unknown.
    """
    if host is None:
        return socket.create_server((_address_towards(urls), 0))
    try:
        return socket.create_server((host, 0))
    except OSError as error:
        raise UserError(
            f"rollout.sglang.sync_host={host}: {error.strerror}; it is the trainer's own address "
            "as the servers see it, null finds it"
        ) from error


def _address_towards(urls: Sequence[str]) -> str:
    """This machine's address on the way to the servers; if only some are here, to the others.

    Raises:
        OSError: no way leads to a server, or its name is unknown.
    """
    found = [address_towards(urlsplit(url).hostname or url) for url in urls]
    return next((address for address in found if not is_loopback(address)), found[0])


def join_group(
    backend: str, listener: socket.socket, world_size: int, name: str, timeout_seconds: float
) -> dist.ProcessGroup:
    """Rank 0 of a process group apart from the default one, which the servers' ranks join on
    their side.

    torch has no public call for a group across programs; this takes the steps SGLang takes
    (sglang.srt.utils.common.init_custom_process_group), so that the keys in the store agree.
    """
    torch_c10d: Any = dist
    new_group: Any = c10d._new_process_group_helper
    timeout = timedelta(seconds=timeout_seconds)
    host, port = listener.getsockname()[:2]
    store = torch_c10d.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # on this one interface, not on all
    )
    group, _ = new_group(
        world_size,
        0,
        [],
        dist.Backend(backend),
        torch_c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
