"""The trainer's side of a process group with SGLang servers: the listening socket and joining.

Not here: what is sent over the group and its members (transports.py).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.network import address_towards
from stable_opd_mcore.serving.process import is_loopback


def listen(host: str | None, urls: Sequence[str]) -> socket.socket:
    """A socket that listens on `host`, or for None on this machine's address towards the servers.

    Raises:
        ConfigError: `host` is not an address of this machine.
        OSError: there is no route to a server, or its name is unknown.
    """
    if host is None:
        return socket.create_server((_address_towards(urls), 0))
    try:
        return socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(
            f"rollout.sglang.sync_host={host}: {error.strerror}; give the trainer's own address "
            "as the servers see it, or null to find it"
        ) from error


def _address_towards(urls: Sequence[str]) -> str:
    """This machine's address towards the servers, if possible towards one on another machine."""
    addresses = [address_towards(urlsplit(url).hostname or url) for url in urls]
    return next((each for each in addresses if not is_loopback(each)), addresses[0])


def join_group(
    backend: str, listener: socket.socket, world_size: int, name: str, timeout_seconds: float
) -> dist.ProcessGroup:
    """Join, as rank 0, a process group whose other ranks are the servers' ranks.

    torch has no public call for a group across programs. This does what SGLang does
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
        master_listen_fd=listener.detach(),  # listens on this interface only
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
