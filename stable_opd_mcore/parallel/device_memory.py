"""Which parts of the trainer are on the GPU: they move to the host and back, in place.

    memory = DeviceMemory(parts, offloaded={"optimizer", "gradients"}, device=world.device)
    memory.hold("student", "optimizer")     # these on the device, other offloaded parts on the host
    memory.lend(servers.release_memory)     # nothing on the device; the next `hold` takes it back

A part is moved storage by storage: the bytes are copied to the host, and the storage is resized to
zero bytes. Every tensor keeps its storage, so Megatron's views of one buffer stay views of it.
Workspaces of Transformer Engine and NCCL and the CUDA context stay. No GPU has run this yet.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.parallel.world import gather_objects


@dataclass(frozen=True)
class Part:
    """Some of the trainer's tensors, which move together."""

    name: str
    # Lists them when called; a storage that an earlier part lists belongs to that part.
    tensors: Callable[[], Iterable[Tensor]]
    # Copied to the host at every move, once, or never; scratch is zero after a move to the device
    content: Literal["changes", "constant", "scratch"] = "changes"
    takes_turns: bool = False  # on the device only while `take_turn` names it


@dataclass(frozen=True)
class _Moved:
    """A storage whose bytes are on the host."""

    tensor: Tensor  # some tensor of the storage; keeps it alive
    num_bytes: int
    host: Tensor | None  # uint8 [num_bytes], pinned for a GPU; None: scratch


class DeviceMemory:
    """The trainer's parts on one rank's device; those not in `offloaded` stay there, unless they
    take turns."""

    def __init__(
        self,
        parts: Sequence[Part] = (),
        offloaded: Collection[str] = (),
        device: torch.device | str = "cpu",
        directory: str | None = None,
    ) -> None:
        """directory: where parts that take turns wait in files; None: in host memory."""
        self._parts = {part.name: part for part in parts}
        self._offloaded = [p.name for p in parts if p.name in offloaded or p.takes_turns]
        self._on_gpu, self._directory = torch.device(device).type == "cuda", directory
        self._moved: dict[str, list[_Moved]] = {}
        self._hosts: dict[tuple[str, int], Tensor] = {}  # by storage; kept, as pinning is slow
        self._give_back: Callable[[], None] | None = None

    @property
    def is_lent(self) -> bool:
        """Whether servers have the device."""
        return self._give_back is not None

    def hold(self, *names: str) -> None:
        """Have these parts on the device and the other offloaded parts on the host.

        Collective while the device is lent: the servers of all ranks release it first.
        """
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()
            gather_objects(None)  # another rank's server may use this rank's device
        self.keep_only(*names)
        self.bring(*names)

    def keep_only(self, *names: str) -> None:
        """Move all offloaded parts but these to the host; move none to the device."""
        leaving = [n for n in self._offloaded if n not in names and n not in self._moved]
        for name in leaving:
            tensors = list(self._storages(name))
            self._forget_hosts(name, {t.untyped_storage()._cdata for t in tensors})
            self._moved[name] = [self._evict(self._parts[name], tensor) for tensor in tensors]
        if leaving:
            self._free(leaving)

    def bring(self, *names: str) -> None:
        """Move these parts to the device, even while it is lent."""
        for name in names:
            for moved in self._moved.pop(name, ()):
                storage = moved.tensor.untyped_storage()
                storage.resize_(moved.num_bytes)
                if moved.host is None:
                    _bytes_of(moved.tensor).zero_()
                else:
                    _bytes_of(moved.tensor).copy_(moved.host, non_blocking=True)

    def take_turn(self, *names: str) -> None:
        """Have these of the parts that take turns on the device and the others of them on the
        host."""
        self.keep_only(
            *(n for n, part in self._parts.items() if n in names or not part.takes_turns)
        )
        self.bring(*names)

    def lend(self, give_back: Callable[[], None], *, keep: Sequence[str] = ()) -> None:
        """Let this rank's servers use the device until the next `hold`, which calls `give_back`, so
        that they release it. Collective: returns when every rank has moved all parts but `keep` to
        the host.
        """
        assert not self.is_lent, "the device is already lent"
        self.keep_only(*keep)
        _empty_caches()  # even if no part has left
        self._give_back = give_back
        gather_objects(None)

    def bytes_left(self) -> int:
        """What the trainer occupies now: all of PyTorch's memory on a GPU, the parts on a CPU."""
        return torch.cuda.memory_allocated() if self._on_gpu else sum(self.num_bytes().values())

    def num_bytes(self) -> dict[str, int]:
        """Part -> bytes on the device now."""
        return {
            name: sum(tensor.untyped_storage().nbytes() for tensor in self._storages(name))
            for name in self._parts
        }

    def _storages(self, name: str) -> Iterator[Tensor]:
        """One tensor of every storage of a part that has bytes on the device."""
        seen: set[int] = set()
        for part in self._parts.values():
            for tensor in part.tensors():
                storage = tensor.untyped_storage()
                if storage._cdata not in seen and storage.nbytes():
                    seen.add(storage._cdata)
                    if part.name == name:
                        yield tensor
            if part.name == name:
                return

    def _forget_hosts(self, name: str, storages: set[int]) -> None:
        """Drop the host memory of the part's storages that no longer exist."""
        for key in [key for key in self._hosts if key[0] == name and key[1] not in storages]:
            del self._hosts[key]

    def _evict(self, part: Part, tensor: Tensor) -> _Moved:
        """Copy a storage to the host; `_free` frees it once all copies have ended."""
        storage = tensor.untyped_storage()
        key, size = (part.name, storage._cdata), storage.nbytes()
        if part.content == "scratch":
            return _Moved(tensor, size, None)
        host = self._hosts.get(key)
        if host is None or host.numel() != size:
            if part.takes_turns and self._directory is not None:
                host = _in_file(self._directory, size)
            else:
                host = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
            self._hosts[key] = host
            host.copy_(_bytes_of(tensor), non_blocking=True)
        elif part.content == "changes":
            host.copy_(_bytes_of(tensor), non_blocking=True)
        return _Moved(tensor, size, host)

    def _free(self, names: Sequence[str]) -> None:
        """Free the storages of parts whose bytes are on the host."""
        if self._on_gpu:
            torch.cuda.synchronize()
        for name in names:
            for moved in self._moved[name]:
                moved.tensor.untyped_storage().resize_(0)
        _empty_caches()


def _in_file(directory: str, size: int) -> Tensor:
    """uint8 [size] in a file without a name, whose space is free when the process ends."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk would end a later write
            return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,)))
    except OSError as error:
        raise UserError(
            f"memory.teachers_directory={directory}: no room for {size / 2**20:,.1f} MiB of a "
            f"teacher ({error.strerror}); set it to a directory on a local disk with room for "
            "all teachers, or drop it"
        ) from None


def _empty_caches() -> None:
    """Give unused cached memory back to the device."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.get_global_memory_buffer().buffer.clear()  # sequence parallelism's
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage: uint8 [storage's size]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
