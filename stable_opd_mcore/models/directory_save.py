"""Write a checkpoint directory on all ranks together, while they go on computing.

    save = DirectorySave(tree, chunks, directory, describe)  # copies to the host, starts a writer
    while not save.is_written(): ...                         # train on
    save.finish()                                            # one rename: the directory appears

Each rank's writer is a process of Megatron's asynchronous strategy, forked with the tensors as they
are. It also hashes the files. Ranks that hold the same weights write a share each. A crash before
`finish` leaves the older directory and a `partial-` one, which the next save removes. Not here:
what is saved (megatron_checkpoint.py, train/persistence/checkpoint.py).
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import (
    describe_space,
    replace_directory,
    restore_directory,
)
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.huggingface import write_config
from stable_opd_mcore.models.manifest import Entries, hash_own_files, write_manifest
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import gather_objects
from stable_opd_mcore.parallel.writer_process import WriterResult, end_with_parent

_BYTES_PER_TENSOR = 3 * 2**10  # of torch's zip format and of the metadata
# RuntimeErrors of torch's and of Megatron's file writers. The last is of newer releases, which log
# the reason and give its class alone.
_WRITE_ERRORS = (
    "inline_container.cc",
    "PytorchStreamWriter",
    "Worker failure: [Errno",
    "Worker failure: An error is caught while starting worker",
)

# Newer releases of Megatron would take those of nvidia-resiliency-ext.
_OWN_WRITERS: dict[str, Any] = (
    {"async_strategy": "mcore"}
    if "async_strategy" in signature(dist_checkpointing.save).parameters
    else {}
)


def sharding() -> dict[str, Any]:
    """Megatron's options for saving and loading, with which any layout reads the checkpoint.

    A new dict each time: Megatron adds the process groups of the layout to it.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }


class DirectorySave:
    """A checkpoint directory that all ranks write.

    The saved tensors may change once the constructor has returned.

    All methods but `abort` are collective.

    Args:
        tree: the sharded tensors, as `weights_of` gives them, and others.
        chunks: the model, for config.json.
        describe: called on rank 0 by `finish` to write the small files.
        add_own_files: called on every rank, now, to write files with the rank's number in their
            names.

    Raises:
        UserError: a rank could not write. The message has the space that was missing. An older
            `directory` is untouched.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        chunks: Sequence[Module],
        directory: Path,
        describe: Callable[[Path], object],
        add_own_files: Callable[[Path], object] = lambda _: None,
    ):
        self._chunks, self._directory, self._describe = chunks, directory, describe
        self._partial = directory.with_name(f"partial-{directory.name}")
        self._needed_bytes = sum(gather_objects(_bytes_of(tree)))
        self._writer, self._hashed = TemporalAsyncCaller(), WriterResult()
        self._together(self._prepare, first_rank_only=True)
        request = self._together(partial(self._plan, tree))
        self._finalize: list[Callable[[], None]] = request.finalize_fns
        self._together(partial(add_own_files, self._partial))  # the writer hashes these files too
        if request.async_fn is not None:
            write = partial(_write_and_hash, self._partial, self._hashed, request.async_fn)
            request = request._replace(async_fn=write, preload_fn=_staging(request))
        self._writer.schedule_async_call(request)

    def _plan(self, tree: dict[str, Any]) -> Any:
        """Copy the tensors to the host. Ranks that hold the same weights share the writing."""
        filesystem_async._results_queue = WriterResult()
        same_weights = unwrap(self._chunks[0]).pg_collection.dp_cp
        return dist_checkpointing.save(
            tree,
            str(self._partial),
            FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), same_weights),
            async_sharded_save=True,
            content_metadata=sharding(),
            **_OWN_WRITERS,
        )

    def is_written(self) -> bool:
        """Whether all ranks' writers have ended; then `finish` does not wait."""
        return self._writer.is_current_async_call_done(blocking=False, no_dist=False)

    def finish(self) -> None:
        """Wait for the writers, then complete the directory.

        Raises:
            UserError: a rank could not write. The message has the space that was missing. An older
                directory is untouched.
        """
        entries: Entries = {}

        def collect() -> None:
            self._writer.close()
            for finalize in self._finalize:
                finalize()
            try:
                entries.update(self._hashed.get_nowait())
            except queue.Empty:  # this rank had no tensor to write
                entries.update(hash_own_files(self._partial))

        def complete() -> None:
            dtype = unwrap(self._chunks[0]).config.params_dtype
            write_config(architecture_of(self._chunks), dtype, self._partial)
            self._describe(self._partial)
            write_manifest(self._partial, gathered)
            replace_directory(self._directory, self._partial)

        self._together(collect)
        gathered = gather_objects(entries)
        self._together(complete, first_rank_only=True)

    def abort(self) -> int:
        """Stop this rank's writer and remove what is written; not collective.

        Returns:
            The bytes that the directory needs.
        """
        self._writer.close(abort=True)
        shutil.rmtree(self._partial, ignore_errors=True)
        return self._needed_bytes

    def _prepare(self) -> None:
        restore_directory(self._directory)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        probe = self._partial / "probe"  # a full disk fails here, before ranks wait for each other
        probe.write_bytes(bytes(2**14))
        probe.unlink()

    def _together(self, action: Callable[[], Any], first_rank_only: bool = False) -> Any:
        """The result of `action`; if any rank cannot write, all clean up and raise UserError."""
        reason = result = None
        try:
            if not first_rank_only or dist.get_rank() == 0:
                result = action()
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            reason = _write_error(error)
            if reason is None:
                raise
        reasons = [reason for reason in gather_objects(reason) if reason is not None]
        if not reasons:
            return result
        self._writer.close(abort=True)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
        dist.barrier()
        space = describe_space(self._partial, self._needed_bytes)
        raise UserError(
            f"{self._partial}: cannot be written: {reasons[0]}; {space}. "
            "Older checkpoints are intact"
        )


def _staging(request: Any) -> Callable[[], Any]:
    """What copies the tensors of a Megatron request from the device, into ordinary memory.

    Megatron's own choice is pinned memory, which a forked process shares instead of having its own:
    the writer would read what the next step's transfers put there. It also takes up to twice the
    room, since torch rounds each tensor up to a power of two and keeps it.
    """
    buckets = request.async_fn_args[1]
    return partial(FileSystemWriterAsync.preload_tensors, buckets, non_blocking=False)


def _write_and_hash(
    directory: Path, hashed: WriterResult, write: Callable[..., None], *args: Any
) -> None:
    """The writer process: write this rank's tensors, then hash all files of this rank.

    A failed write reaches `finish` as Megatron's own result.
    """
    end_with_parent()
    write(*args)
    hashed.put(hash_own_files(directory))


def _write_error(error: BaseException) -> str | None:
    """Why a file could not be written; None for an error of another kind."""
    if isinstance(error, CheckpointException):  # the errors of all ranks, on the first rank alone
        causes = [cause for cause, _ in error.failures.values()]
        return _write_error(causes[0]) if causes else "another rank failed to write"
    known = isinstance(error, OSError | SafetensorError)
    if known or any(words in str(error) for words in _WRITE_ERRORS):
        return str(error)
    return None


def _bytes_of(tree: dict[str, Any]) -> int:
    """Bytes of the files that this rank writes, about."""
    return sum(
        item.data.nbytes + _BYTES_PER_TENSOR
        for item in nested_values(tree)
        if isinstance(item, ShardedTensor | ShardedTensorFactory)
        and is_main_replica(item.replica_id)
        and item.data is not None
    )
