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


class GroupStore:
    """The store in which the group's ranks find each other. `close` fails whoever waits for it."""

    def __init__(self, listener: socket.socket, world_size: int, timeout_seconds: float) -> None:
        self.address = listener.getsockname()[:2]
        self.world_size = world_size
        self.timeout = timedelta(seconds=timeout_seconds)
        torch_c10d: Any = dist
        self._server: Any = torch_c10d.TCPStore(
            *self.address,
            world_size,
            is_master=True,
            timeout=self.timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # listens on this interface only
        )

    def close(self) -> None:
        self._server = None  # ends torch's thread that serves the store

    def client(self) -> Any:
        """A connection to the store, as the servers' ranks have one each."""
        torch_c10d: Any = dist
        return torch_c10d.TCPStore(
            *self.address,
            self.world_size,
            is_master=False,
            timeout=self.timeout,
            wait_for_workers=False,
        )


def join_group(backend: str, store: GroupStore, name: str) -> dist.ProcessGroup:
    """Join, as rank 0, a process group whose other ranks are the servers' ranks.

    torch has no public call for a group across programs. This does what SGLang does
    (sglang.srt.utils.common.init_custom_process_group), so that the keys in the store agree.
    """
    torch_c10d: Any = dist
    new_group: Any = c10d._new_process_group_helper
    group, _ = new_group(
        store.world_size,
        0,
        [],
        dist.Backend(backend),
        torch_c10d.PrefixStore(name, store.client()),
        group_name=name,
        timeout=store.timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(store.world_size)}
    return group
