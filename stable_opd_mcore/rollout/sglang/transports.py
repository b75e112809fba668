"""Three ways to transfer a bucket of weights to servers: process group, shared memory, files.

    transport.open(targets, label); transport.send(bucket) ...; transport.close()

`send` returns before the bucket has arrived, so that the next one is packed meanwhile into the
other of two buffers. Both buffers are kept between publishes: copying into fresh memory takes ten
times as long. A server that fails is recorded in `failed` and skipped from then on; nothing raises
for it. There is one sender, and it sends to all servers at once. Not here: which weights are sent
and their verification (sync.py), restarts (fleet.py).
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.rollout.sglang.group import GroupStore, join_group, listen
from stable_opd_mcore.serving.client import RefusedRequest, ServerFailure, SglangClient

_POLL_SECONDS = 0.0005
_GRACE_SECONDS = 5.0
GROUP_LOST = "the process group is lost"  # begins a failure that another server may have caused
INCOMPLETE = "incomplete"  # the version that a server states from the first bucket to verification


@dataclass(frozen=True)
class Target:
    """A server that receives weights."""

    name: str
    client: SglangClient
    tensor: int  # the number of its tensor-parallel ranks


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, one after the other in a buffer that the bucket after next reuses."""

    flat: Tensor  # uint8
    tensors: tuple[tuple[str, Tensor], ...]  # views into flat


class Buffers:
    """The memory of two buckets, used in turn."""

    def __init__(self) -> None:
        self._next, self._last = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 [num_bytes], not initialised; the second next call returns the same memory."""
        if self._next.numel() < num_bytes or self._next.device != device:
            self._next = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._next, self._last = self._last, self._next
        return self._last[:num_bytes]


class Transport:
    """Common to the three: targets, buffers, and requests to all targets at once."""

    def __init__(self, timeout_seconds: float) -> None:
        self.failed: dict[str, str] = {}
        self.buffers = Buffers()
        self._timeout = timeout_seconds
        self._grace_seconds: float | None = None  # for other servers after one has failed
        self._targets: list[Target] = []
        self._pending: Pending | None = None

    @property
    def alive(self) -> list[Target]:
        return [target for target in self._targets if target.name not in self.failed]

    def open(self, targets: Sequence[Target], label: str) -> None:  # noqa: ARG002
        """Prepare one publish; `label` is unique to it."""
        self._targets, self.failed, self._pending = list(targets), {}, None

    def send(self, bucket: Bucket) -> None:
        """Start to send a bucket; its buffer is free when the next `send` or `close` returns."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait until all buckets have arrived."""
        self._settle()

    def clean_up(self) -> None:
        """Remove what servers may have read until now. Called once their weights are verified."""

    def _settle(self) -> None:
        """Wait until the servers have loaded the last bucket."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait(self._grace_seconds)

    def post(self, path: str, payload: Callable[[Target], dict[str, Any]]) -> Pending:
        """Send a POST to every target that is alive; `Pending.wait` records failures."""
        return Pending(self, path, payload)

    def fail(self, target: Target, reason: str) -> None:
        self.failed.setdefault(target.name, reason)


class Pending:
    """POST requests in flight, one to each target that is alive."""

    def __init__(
        self, transport: Transport, path: str, payload: Callable[[Target], dict[str, Any]]
    ) -> None:
        self._transport = transport
        targets = transport.alive
        self._pool = ThreadPoolExecutor(max(1, len(targets)), thread_name_prefix="sync")
        self._futures = [
            (target, self._pool.submit(self._call, target, path, payload(target)))
            for target in targets
        ]

    def _call(self, target: Target, path: str, payload: dict[str, Any]) -> None:
        timeout = self._transport._timeout
        answer = target.client.call("POST", path, payload, timeout_seconds=timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerFailure(target.client.url, "status", f"{path}: {answer.get('message')}")

    def has_failed(self) -> bool:
        """Whether some request has failed already."""
        return any(future.done() and future.exception() for _, future in self._futures)

    def wait(self, grace_seconds: float | None = None) -> None:
        """Wait for all replies and record failures.

        Args:
            grace_seconds: after a first failure the other replies are waited for so long; then
                their requests are dropped. None: without limit.
        """
        futures = [future for _, future in self._futures]
        wait(futures, return_when=FIRST_EXCEPTION)
        if grace_seconds is not None:
            wait(futures, timeout=grace_seconds)
        for target, future in self._futures:
            if not future.done():
                target.client.close()
                self._transport.fail(target, f"{GROUP_LOST}: another server failed")
                continue
            try:
                future.result()
            except (ServerFailure, RefusedRequest) as error:
                self._transport.fail(target, str(error))
        self._pool.shutdown()


def _description(bucket: Bucket) -> dict[str, Any]:
    return {
        "names": [name for name, _ in bucket.tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket.tensors],
        "shapes": [list(tensor.shape) for _, tensor in bucket.tensors],
        "flush_cache": False,  # sync.py flushes after the last bucket
        "weight_version": INCOMPLETE,
    }


class DistributedTransport(Transport):
    """Broadcast over a process group of the sender (rank 0) and every server's tensor ranks.

    NCCL between GPUs, gloo between CPUs. The group is kept while the targets stay the same.

    Args:
        host: this machine's address as the servers see it; None: found from the routes to them.
    """

    def __init__(self, timeout_seconds: float, host: str | None, backend: str) -> None:
        super().__init__(timeout_seconds)
        self._grace_seconds = _GRACE_SECONDS  # without one member no broadcast ends
        self._host = host
        self._backend = backend
        self._group: dist.ProcessGroup | None = None
        self._store: GroupStore | None = None
        self._label = ""
        self._members: list[tuple[str, SglangClient]] = []

    def open(self, targets: Sequence[Target], label: str) -> None:
        members = [(target.name, target.client) for target in targets]
        if self._group is not None and members != self._members:
            self.leave()
        super().open(targets, label)
        self._members = members
        if self._group is None and targets:
            self._join(label)

    def send(self, bucket: Bucket) -> None:
        """Return when the bytes have been sent; the servers load them while the next is packed.

        So no other collective runs beside the broadcast.
        """
        self._settle()
        if self._group is None:
            return  # the group broke at an earlier bucket
        body = _description(bucket) | {"group_name": self._label, "load_format": "flattened_bucket"}
        pending = self.post("/update_weights_from_distributed", lambda _: body)
        self._pending = pending
        try:
            work = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
            assert work is not None
            while not work.is_completed() and not pending.has_failed():
                time.sleep(_POLL_SECONDS)
            if not pending.has_failed():
                work.wait()
        except RuntimeError as error:
            self._break(f"the broadcast failed: {error}")

    def _settle(self) -> None:
        super()._settle()
        if any(name in self.failed for name, _ in self._members):
            self._break("it lost a member")

    def leave(self) -> None:
        """Dissolve the group on both sides."""
        if self._group is None:
            return
        pending = self.post("/destroy_weights_update_group", lambda _: {"group_name": self._label})
        self._destroy()
        pending.wait()

    def _join(self, label: str) -> None:
        # random, because an external server may still hold a group of an earlier run
        self._label = f"stable-opd-{label}-{secrets.token_hex(4)}"
        try:
            listener = listen(self._host, [target.client.url for target in self._targets])
        except OSError as error:
            self._break(f"no route to the servers: {error}")
            return
        offsets, world_size = {}, 1
        for target in self._targets:
            offsets[target.name], world_size = world_size, world_size + target.tensor
        self._store = store = GroupStore(listener, world_size, self._timeout)
        host, port = store.address
        pending = self.post(
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
        # joining blocks until all ranks have joined, so a thread does it
        with ThreadPoolExecutor(1, thread_name_prefix="join") as thread:
            joined = thread.submit(join_group, self._backend, store, self._label)
            while not joined.done() and not pending.has_failed():
                time.sleep(_POLL_SECONDS)
            if not joined.done():
                store.close()  # ends the join here and in the servers
        reason = joined.exception()
        if reason is None:
            self._group = joined.result()
        elif not isinstance(reason, RuntimeError | ValueError):  # torch's are RuntimeErrors
            raise reason
        pending.wait(_GRACE_SECONDS)
        if self.failed or reason is not None:
            self._break(f"it did not form: {reason or 'a server refused'}")

    def _break(self, reason: str) -> None:
        """Fail all targets: a group that lost a member cannot be used, so all are sent again."""
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
        held[0].abort()  # NCCL would otherwise wait for what is still being sent
        dist.destroy_process_group(held[0])
        # gloo cannot abort: its destructor waits for an unreachable machine until the time-out
        threading.Thread(target=held.clear, name="destroy", daemon=True).start()


class TensorTransport(Transport):
    """Send a handle of the memory: CUDA IPC between processes of one GPU machine, shared memory
    on a CPU."""

    def send(self, bucket: Bucket) -> None:
        handles = {
            target.name: [_handles(bucket) for _ in range(target.tensor)] for target in self.alive
        }
        self._settle()  # servers copy a bucket before they reply
        self._pending = self.post(
            "/update_weights_from_tensor",
            lambda target: {
                "serialized_named_tensors": handles[target.name],
                "flush_cache": False,
                "weight_version": INCOMPLETE,
            },
        )


def _handles(bucket: Bucket) -> str:
    """The bucket's tensors, pickled for one process: torch counts the receivers of a handle."""
    pickled = io.BytesIO()
    with _sharing_by_file_name():
        ForkingPickler(pickled).dump(list(bucket.tensors))
    return base64.b64encode(pickled.getvalue()).decode()


@contextlib.contextmanager
def _sharing_by_file_name() -> Iterator[None]:
    """Share CPU tensors by file name; torch's default passes descriptors to child processes."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class DiskTransport(Transport):
    """Safetensors in a directory that the servers read when it is complete."""

    def __init__(
        self, timeout_seconds: float, directory: Path, model_config: dict[str, Any]
    ) -> None:
        super().__init__(timeout_seconds)
        self._root = directory
        self._model_config = model_config
        self._directory = directory
        self._num_files = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._writing: Future[None] | None = None

    def open(self, targets: Sequence[Target], label: str) -> None:
        super().open(targets, label)
        self._directory = self._root / label
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self._num_files = 0
        (self._directory / "config.json").write_text(json.dumps(self._model_config))

    def send(self, bucket: Bucket) -> None:
        self._num_files += 1
        file = self._directory / f"model-{self._num_files:05d}.safetensors"
        self._settle()
        self._writing = self._writer.submit(write_safetensors, file, bucket)

    def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        super().close()
        body = {
            "model_path": str(self._directory.resolve()),
            "load_format": "safetensors",  # the server itself started with random weights
            "flush_cache": False,
            "weight_version": INCOMPLETE,
        }
        self.post("/update_weights_from_disk", lambda _: body).wait()

    def clean_up(self) -> None:
        # Not in close: a server's first tensor rank answers for all, others may still read.
        shutil.rmtree(self._directory, ignore_errors=True)


_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_safetensors(file: Path, bucket: Bucket) -> None:
    """Write a header and the bucket's memory (huggingface/safetensors, "Format").

    safetensors' own `save_file` refuses tensors that share a buffer, and copies every tensor.
    """
    header, start = {}, 0
    for name, tensor in bucket.tensors:
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.write(bucket.flat.cpu().numpy().data)
