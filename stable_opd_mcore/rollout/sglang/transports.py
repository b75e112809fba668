"""Transfer buckets of weights to servers: the common parts, and by shared memory and by files.

    transport.open(targets, label); transport.send(bucket) ...; transport.close()

`send` returns before the bucket has arrived, so that the next one is packed meanwhile into the
other of two buffers. Both buffers are kept between publishes: copying into fresh memory takes ten
times as long. A server that fails is recorded in `failed` and skipped from then on; nothing raises
for it. A sender sends to all its servers at once.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.parallel.world import broadcast_object, gather_objects
from stable_opd_mcore.serving.client import RefusedRequest, ServerFailure, SglangClient
from stable_opd_mcore.serving.requests import Call

Result = TypeVar("Result")
GROUP_LOST = "the process group is lost"  # begins a failure that another server may have caused
NOT_THE_DRAFT = {"selector": "target"}  # in a request: the student only, not a draft next to it
INCOMPLETE = "incomplete"  # the version that a server states from the first bucket to verification


@dataclass(frozen=True)
class Target:
    """A server that receives weights."""

    name: str
    client: SglangClient
    tensor: int  # the number of its tensor-parallel ranks
    life: int = 0  # differs after each failure, which ends its process groups

    @property
    def identity(self) -> tuple[str, str, int]:
        """The same as long as the server's process lives."""
        return self.name, self.client.url, self.life


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, one after the other in a buffer that the bucket after next reuses."""

    flat: Tensor  # uint8
    tensors: tuple[tuple[str, Tensor], ...]  # views into flat


class Buffers:
    """The memory of two buckets, used in turn."""

    def __init__(self) -> None:
        self.free()

    def free(self) -> None:  # while no bucket is in flight
        self._next, self._last = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 [num_bytes], not initialised; the call after next returns the same memory."""
        if self._next.numel() < num_bytes or self._next.device != device:
            self._next = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._next, self._last = self._last, self._next
        return self._last[:num_bytes]


class Transport:
    """What all transports share: targets, buffers, and requests to all targets at once."""

    is_sender = True  # this rank talks to the servers; others only share the memory of their GPUs

    def __init__(self, timeout_seconds: float) -> None:
        self.failed: dict[str, str] = {}
        self.buffers = Buffers()
        self.timeout = timeout_seconds
        self._grace_seconds: float | None = None  # the other servers' after one has failed
        self._targets: list[Target] = []
        self._pending: Pending | None = None

    @property
    def alive(self) -> list[Target]:
        return [target for target in self._targets if target.name not in self.failed]

    def open(self, targets: Sequence[Target], label: str) -> None:  # noqa: ARG002
        """Prepare one push; `label` is unique to it."""
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

    def fail(self, target: Target, reason: str) -> None:
        self.failed.setdefault(target.name, reason)


def ask_all(
    targets: Sequence[Target], ask: Callable[[Target], Result]
) -> tuple[dict[str, Result], dict[str, str]]:
    """Ask all targets at the same time: results by name, and why the other targets failed."""
    with ThreadPoolExecutor(max(1, len(targets)), thread_name_prefix="sync") as pool:
        futures = {target.name: pool.submit(ask, target) for target in targets}
    results, failed = {}, {}
    for name, future in futures.items():
        try:
            results[name] = future.result()
        except (ServerFailure, RefusedRequest) as error:
            failed[name] = str(error)
    return results, failed


class Pending:
    """POST requests in flight, one to each target that is alive."""

    def __init__(
        self, transport: Transport, path: str, body: Callable[[Target], dict[str, Any]]
    ) -> None:
        self._transport, self._path = transport, path
        self._replies = [
            (target, target.client.submit(Call("POST", path, body(target)), transport.timeout))
            for target in transport.alive
        ]

    def has_failed(self) -> bool:
        """Whether some request has failed already."""
        return any(reply.done() and self._failure(reply) for _, reply in self._replies)

    def wait(self, grace_seconds: float | None = None) -> None:
        """Wait for all replies and record failures. After a first failure wait `grace_seconds` for
        the others, then drop their requests; None: without limit."""
        replies = {reply for _, reply in self._replies}
        while replies and not self.has_failed():
            _, replies = wait(replies, return_when=FIRST_COMPLETED)
        wait(replies, timeout=grace_seconds)
        for target, reply in self._replies:
            if not reply.done():
                target.client.close()
                self._transport.fail(target, f"{GROUP_LOST}: another server failed")
            elif failure := self._failure(reply):
                self._transport.fail(target, failure)

    def _failure(self, reply: Future[Any]) -> str | None:
        """What is wrong with a reply that is there; other errors are raised."""
        try:
            answer = reply.result()
        except (ServerFailure, RefusedRequest) as error:
            return str(error)
        if isinstance(answer, dict) and answer.get("success") is False:
            return f"{self._path}: {answer.get('message')}"
        return None


def description(bucket: Bucket) -> dict[str, Any]:
    return {
        "names": [name for name, _ in bucket.tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket.tensors],
        "shapes": [list(tensor.shape) for _, tensor in bucket.tensors],
        "flush_cache": False,  # sync.py flushes after the last bucket
        **NOT_THE_DRAFT,
        "weight_version": INCOMPLETE,
    }


class TensorTransport(Transport):
    """Send a handle of the memory: CUDA IPC between processes on one GPU, shared memory on a CPU.

    All ranks of a replica, `group`, hold each bucket; the first one sends. Every tensor rank of a
    server reads it from the trainer rank on its own GPU, so that no server needs a context on
    another GPU: `sources` has, by server name, a rank of `group` for each tensor rank. Servers that
    are not named read from the sender.
    """

    def __init__(
        self,
        timeout_seconds: float,
        group: dist.ProcessGroup | None = None,
        sources: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(timeout_seconds)
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._sources = sources or {}
        self.is_sender = self._rank == 0

    def send(self, bucket: Bucket) -> None:  # collective over `group`
        self._settle()  # servers copy a bucket before they reply
        if self._group is not None:
            self.failed = broadcast_object(self.failed, self._group)
        own = {target.name: self._own_handles(target, bucket) for target in self.alive}
        handles = [own] if self._group is None else gather_objects(own, self._group)
        if not self.is_sender:
            return
        self._pending = Pending(
            self,
            "/update_weights_from_tensor",
            lambda target: {
                "serialized_named_tensors": [
                    handles[source][target.name][place]
                    for place, source in enumerate(self._sources_of(target))
                ],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": INCOMPLETE,
                **NOT_THE_DRAFT,
            },
        )

    def _sources_of(self, target: Target) -> Sequence[int]:
        return self._sources.get(target.name, [0] * target.tensor)

    def _own_handles(self, target: Target, bucket: Bucket) -> dict[int, str]:
        """The target's tensor rank -> its handle of this rank's memory."""
        return {
            place: handle_of(bucket)
            for place, source in enumerate(self._sources_of(target))
            if source == self._rank
        }


def handle_of(bucket: Bucket) -> str:
    """The bucket in SGLang's format "flattened_bucket", pickled for one process. The buffer is
    shared once: torch wraps a storage in one more layer each time that it is shared."""
    pickled = io.BytesIO()
    pickler = ForkingPickler(pickled)
    if bucket.flat.is_cuda:
        reducers: Any = pickler.dispatch_table  # this pickler's only
        reducers[Tensor] = _reduce_cuda_tensor
    with _sharing_by_file_name():
        pickler.dump({"flattened_tensor": bucket.flat, "metadata": _places(bucket)})
    return base64.b64encode(pickled.getvalue()).decode()


def _places(bucket: Bucket) -> list[SimpleNamespace]:
    """The bucket's tensors with their bytes in `flat`, as SGLang's FlattenedTensorMetadata."""
    ends = accumulate(tensor.nbytes for _, tensor in bucket.tensors)
    return [
        SimpleNamespace(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            start_idx=end - tensor.nbytes,
            end_idx=end,
            numel=tensor.nbytes,
        )
        for (name, tensor), end in zip(bucket.tensors, ends, strict=True)
    ]


# places in the arguments of torch's rebuild_cuda_tensor
_STORAGE_CLASS, _DEVICE, _COUNTER, _COUNTER_OFFSET = 4, 6, 11, 12
_NO_COUNTER = b"none"


def _reduce_cuda_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """torch's reduction with the GPU's UUID in place of its index, and with no receiver counted.

    Trainer and server may count the GPUs they see in different ways. SGLang finds the UUID
    (sglang/srt/utils/patch_torch.py).

    torch frees shared memory once its receiver has counted itself off, so a server that dies before
    that would keep a buffer for good. Here a buffer waits only for the reply, and buffers are freed
    when every server has the weights (publisher.py). So the receiver is counted off here; its own
    attempt finds no counter, which torch ignores, as it does after the sender's end.
    """
    reduced: Any = reductions.reduce_tensor(tensor)
    rebuild, found = reduced
    arguments = list(found)
    index = arguments[_DEVICE]
    arguments[_STORAGE_CLASS]._release_ipc_counter(
        arguments[_COUNTER], arguments[_COUNTER_OFFSET], device=index
    )
    arguments[_COUNTER] = _NO_COUNTER
    arguments[_DEVICE] = str(torch.cuda.get_device_properties(index).uuid)
    return rebuild, tuple(arguments)


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

    def open(self, targets: Sequence[Target], label: str) -> None:
        super().open(targets, label)
        self._directory = self._root / label
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self._num_files = 0
        (self._directory / "config.json").write_text(json.dumps(self._model_config), "utf-8")

    def send(self, bucket: Bucket) -> None:
        self._num_files += 1
        file = self._directory / f"model-{self._num_files:05d}.safetensors"
        # copies, because safetensors refuses tensors that share a buffer
        save_tensors({name: tensor.cpu().clone() for name, tensor in bucket.tensors}, file)

    def close(self) -> None:
        body = {
            "model_path": str(self._directory.resolve()),
            "load_format": "safetensors",  # the server itself started with random weights
            "flush_cache": False,
            "weight_version": INCOMPLETE,
        }
        Pending(self, "/update_weights_from_disk", lambda _: body).wait()

    def clean_up(self) -> None:
        # Not in close: a server's first tensor rank answers for all, others may still read.
        shutil.rmtree(self._directory, ignore_errors=True)
