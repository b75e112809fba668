"""Transfer buckets of weights over a process group of the trainer and SGLang servers.

The trainer listens, the servers connect, all join; a bucket is then one broadcast. NCCL connects at
the first broadcast: `ncclCommInitRank` blocks in C until every member has called it, for ever if
one died. So joins and broadcasts run in a thread of their own, which is abandoned at the deadline;
the thread is a daemon, so it does not keep the process from ending. No GPU has run this yet.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.host.network import address_towards
from stable_opd_mcore.rollout.sglang.transports import (
    GROUP_LOST,
    Bucket,
    Pending,
    Target,
    Transport,
    description,
)
from stable_opd_mcore.serving.command import NCCL_SETTINGS

Result = TypeVar("Result")

_POLL_SECONDS = 0.0005
_GRACE_SECONDS = 5.0
_CONNECT_SECONDS = 1.0


def listen(urls: Sequence[str]) -> socket.socket:
    """A socket on this machine's address towards the servers, if possible towards one on another
    machine. Raises OSError without a route to a server."""
    addresses = [address_towards(urlsplit(url).hostname or url) for url in urls]
    outside = (a for a in addresses if not ipaddress.ip_address(a).is_loopback)
    return socket.create_server((next(outside, addresses[0]), 0))


def prepare_nccl(config: Config) -> None:
    """Give NCCL SGLang's settings where the user set none, before the first process group."""
    if config.rollout.has_servers and config.rollout.sglang.transport == "distributed":
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)


def in_daemon(call: Callable[[], Result], name: str) -> Future[Result]:
    """Run `call` in a thread that does not keep the process from ending."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the result is read
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def call_aside(call: Callable[[], Result], is_over: Callable[[], bool]) -> Future[Result]:
    """Run `call` in a daemon thread until it returns or `is_over`; not done: it is abandoned."""
    future = in_daemon(call, "weight-group")
    while not future.done() and not is_over():
        time.sleep(_POLL_SECONDS)
    return future


class GroupStore:
    """The store in which the group's ranks find each other; `close` fails whoever waits in it."""

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
        # connected here: a client that finds the store closed retries until its time-out
        self.client: Any = torch_c10d.TCPStore(
            *self.address, world_size, is_master=False, timeout=self.timeout, wait_for_workers=False
        )

    def close(self) -> None:
        self._server = None  # ends torch's thread that serves the store


def join_group(backend: str, store: GroupStore, name: str) -> dist.ProcessGroup:
    """Join, as rank 0, a process group whose other ranks are the servers' ranks.

    torch has no public call for a group across programs. These are the calls of SGLang's
    init_custom_process_group, so that the keys in the store agree.
    """
    torch_c10d: Any = dist
    new_group: Any = c10d._new_process_group_helper
    group, _ = new_group(
        store.world_size,
        0,
        [],
        dist.Backend(backend),
        torch_c10d.PrefixStore(name, store.client),
        group_name=name,
        timeout=2 * store.timeout,  # NCCL's own watchdog ends this process: it must come last
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(store.world_size)}
    return group


class DistributedTransport(Transport):
    """Broadcast over a process group of the sender (rank 0) and every server's tensor ranks.

    NCCL between GPUs, gloo between CPUs. The group is kept while the targets stay the same.

    Args:
        timeout_seconds: limit for the group to form, and for each bucket.
    """

    def __init__(self, timeout_seconds: float, backend: str) -> None:
        super().__init__(timeout_seconds)
        self._grace_seconds = _GRACE_SECONDS  # without one member no broadcast ends
        self._backend = backend
        self._group: dist.ProcessGroup | None = None
        self._store: GroupStore | None = None
        self._label = ""
        self._members: list[tuple[str, str, int]] = []

    def open(self, targets: Sequence[Target], label: str) -> None:
        members = [target.identity for target in targets]
        if self._group is not None and members != self._members:
            # a server that was started again does not know the group, and would refuse to leave it
            self._targets = [t for t in self._targets if t.identity in members]
            self.leave()
        super().open(targets, label)
        self._members = members
        if self._group is None and targets:
            self._join(label)

    def send(self, bucket: Bucket) -> None:
        """Return when the bytes have been sent, so that no other collective runs during the
        broadcast; the servers load them while the next bucket is packed."""
        self._settle()
        if self._group is None:
            return  # the group broke at an earlier bucket
        body = description(bucket) | {"group_name": self._label, "load_format": "flattened_bucket"}
        pending = Pending(self, "/update_weights_from_distributed", lambda _: body)
        self._pending = pending
        group, is_over = self._group, self._until(pending)
        sent = call_aside(lambda: _broadcast(bucket.flat, group, is_over), is_over)
        if not sent.done() and not pending.has_failed():
            self._break(f"a broadcast did not end in {self.timeout:g} s")
        elif sent.done() and (error := sent.exception()) is not None:
            if not isinstance(error, RuntimeError):
                raise error
            self._break(f"the broadcast failed: {error}")

    def _until(self, pending: Pending) -> Callable[[], bool]:
        """Whether a server has failed or the time is over."""
        deadline = time.monotonic() + self.timeout
        return lambda: pending.has_failed() or time.monotonic() > deadline

    def _settle(self) -> None:
        super()._settle()
        if any(name in self.failed for name, _, _ in self._members):
            self._break("it lost a member")

    def leave(self) -> None:
        """Dissolve the group on both sides."""
        if self._group is None:
            return
        pending = Pending(
            self, "/destroy_weights_update_group", lambda _: {"group_name": self._label}
        )
        self._destroy()
        pending.wait()

    def _join(self, label: str) -> None:
        # random, because an external server may still hold a group of an earlier run
        self._label = f"stable-opd-{label}-{secrets.token_hex(4)}"
        try:
            listener = listen([target.client.url for target in self._targets])
        except OSError as error:
            self._break(f"no route to the servers: {error}")
            return
        offsets, world_size = {}, 1
        for target in self._targets:
            offsets[target.name], world_size = world_size, world_size + target.tensor
        self._store = store = GroupStore(listener, world_size, self.timeout)
        host, port = store.address
        pending = Pending(
            self,
            "/init_weights_update_group",
            lambda target: {
                "master_address": host,
                "master_port": port,
                "rank_offset": offsets[target.name],
                "world_size": world_size,
                "group_name": self._label,
                "backend": self._backend,
            },
        )
        backend, label = self._backend, self._label
        joined = call_aside(lambda: join_group(backend, store, label), self._until(pending))
        if not joined.done():
            time.sleep(_CONNECT_SECONDS)  # a server that connects later would retry for long
            store.close()  # ends the join here and in the servers
        try:
            reason = joined.exception(_GRACE_SECONDS)
        except TimeoutError:
            reason = RuntimeError(f"no member joined in {self.timeout:g} s")
        if reason is None:
            self._group = joined.result()
        elif not isinstance(reason, RuntimeError | ValueError):  # torch's are RuntimeErrors
            raise reason
        pending.wait(_GRACE_SECONDS)
        if self.failed or reason is not None:
            self._break(f"it did not form: {reason or 'a server refused'}")

    def _break(self, reason: str) -> None:
        """Fail all targets: a group that lost a member is of no use, so all are sent again."""
        self._destroy()
        for target in self.alive:
            self.fail(target, f"{GROUP_LOST}: {reason}")

    def _destroy(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._group is None:
            return
        held, self._group = [self._group], None

        def end() -> None:
            held[0].abort()  # NCCL would otherwise wait for what is still being sent
            dist.destroy_process_group(held[0])
            held.clear()  # gloo cannot abort: its destructor waits for an unreachable machine

        ending = threading.Thread(target=end, name="destroy", daemon=True)
        ending.start()
        ending.join(_GRACE_SECONDS)


def _broadcast(flat: torch.Tensor, group: dist.ProcessGroup, is_over: Callable[[], bool]) -> None:
    """Send the bucket; returns when it has been sent or `is_over`."""
    if flat.is_cuda:
        torch.cuda.set_device(flat.device)  # a new thread starts on GPU 0
    work = dist.broadcast(flat, src=0, group=group, async_op=True)
    assert work is not None
    while not work.is_completed():
        if is_over():
            return
        time.sleep(_POLL_SECONDS)
    work.wait()
