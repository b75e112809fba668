"""Write a checkpoint directory on all ranks together.

Ranks that hold the same weights write a share each, and each rank hashes its files. One rename
makes the directory appear; a crash before leaves the older directory and a `partial-` one, which
the next save removes.
"""

from __future__ import annotations

import multiprocessing
import queue
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

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
from stable_opd_mcore.models.files.manifest import hash_own_files, write_manifest
from stable_opd_mcore.models.files.small_files import write_config
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import gather_objects

_T = TypeVar("_T")
_BYTES_PER_TENSOR = 3 * 2**10  # taken by torch's zip format and by the metadata
# RuntimeErrors of torch's and of Megatron's file writers. The last is of newer releases, which log
# the reason and give only its class.
_WRITE_ERRORS = (
    "inline_container.cc",
    "PytorchStreamWriter",
    "Worker failure: [Errno",
    "Worker failure: a process that writes",
    "Worker failure: An error is caught while starting worker",
)

# Newer releases of Megatron would take those of nvidia-resiliency-ext.
_OWN_WRITERS: dict[str, Any] = (
    {"async_strategy": "mcore"}
    if "async_strategy" in signature(dist_checkpointing.save).parameters
    else {}
)
_WRITE_FILE: Any = FileSystemWriterAsync.write_preloaded_data
_FORKS_WRITERS = "local_proc_idx" in signature(_WRITE_FILE).parameters


def sharding() -> dict[str, Any]:
    """Megatron's options that let any layout read it; a new dict, because Megatron adds to it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }


def save_directory(
    tree: dict[str, Any],
    chunks: Sequence[Module],
    directory: Path,
    describe: Callable[[Path], object],
    add_own_files: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write a checkpoint directory, which replaces an older one. Collective.

    Args:
        tree: the sharded tensors, as `weights_of` gives them, and others.
        describe: called on rank 0 to write the small files.
        add_own_files: called on every rank to write files with the rank's number in their names.

    Raises:
        UserError: a rank could not write, and why. An older `directory` is untouched.
    """
    partial_directory = directory.with_name(f"partial-{directory.name}")
    needed_bytes = sum(gather_objects(_bytes_of(tree)))
    together = partial(_together, partial_directory, needed_bytes)
    is_first = dist.get_rank() == 0

    def complete() -> None:
        dtype = unwrap(chunks[0]).config.params_dtype
        write_config(architecture_of(chunks), dtype, partial_directory)
        describe(partial_directory)
        write_manifest(partial_directory, entries)
        replace_directory(directory, partial_directory)

    together(lambda: _prepare(directory, partial_directory) if is_first else None)
    together(lambda: _write(tree, chunks, partial_directory))
    together(lambda: add_own_files(partial_directory))
    entries = together(lambda: hash_own_files(partial_directory))
    together(lambda: complete() if is_first else None)


def _prepare(directory: Path, partial_directory: Path) -> None:
    restore_directory(directory)
    shutil.rmtree(partial_directory, ignore_errors=True)
    partial_directory.mkdir(parents=True)
    probe = partial_directory / "probe"  # a full disk fails here, before ranks wait for each other
    probe.write_bytes(bytes(2**14))
    probe.unlink()


def _write(tree: dict[str, Any], chunks: Sequence[Module], directory: Path) -> None:
    # In place of a queue in a process of its own, which would outlive a killed rank.
    filesystem_async._results_queue = queue.SimpleQueue()
    same_weights = unwrap(chunks[0]).pg_collection.dp_cp
    request: Any = dist_checkpointing.save(
        tree,
        str(directory),
        FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), same_weights),
        async_sharded_save=True,
        content_metadata=sharding(),
        **_OWN_WRITERS,
    )
    if request.async_fn is not None:
        # In place of pinned memory, which takes up to twice the room: torch rounds each tensor up
        # to a power of two, and keeps it.
        stage = FileSystemWriterAsync.preload_tensors
        buckets = request.async_fn_args[1]
        request = request._replace(preload_fn=partial(stage, buckets, non_blocking=False))
        if _FORKS_WRITERS:  # newer releases write in threads
            request = request._replace(async_fn=partial(_write_buckets, request.async_fn.args[0]))
    request.execute_sync()


def _write_buckets(
    transforms: Sequence[Any], _rank: int, buckets: Sequence[Any], results: queue.SimpleQueue[Any]
) -> None:
    """Write each bucket in a forked process; put the results, or the first error, into `results`.

    In place of Megatron's function, which waits for ever for a process that was killed.
    """
    context = multiprocessing.get_context("fork")
    writers: list[tuple[Any, Connection]] = []
    try:
        for number, bucket in enumerate(buckets):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (transforms, number, bucket, sender)
            process = context.Process(target=_write_bucket, args=arguments)
            with sender:  # only the process keeps it, so its end is noticed
                process.start()
            writers.append((process, receiver))
        results.put({number: _result_of(*writer) for number, writer in enumerate(writers)})
    except Exception as error:  # Megatron takes it from the queue and raises it on all ranks
        results.put(error)
    finally:
        for process, receiver in writers:
            receiver.close()
            process.kill()  # after an error; else it has ended
            process.join()


def _write_bucket(transforms: Sequence[Any], number: int, bucket: Any, results: Connection) -> None:
    _WRITE_FILE(
        transforms,
        local_proc_idx=number,
        write_bucket=bucket,
        results_queue=SimpleNamespace(put=results.send),
        count_queue=SimpleNamespace(get=lambda: number, task_done=lambda: None),
        use_fsync=True,
    )


def _result_of(process: Any, receiver: Connection) -> list[Any]:
    try:
        _, found = receiver.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode
        how = f"signal {-code}, as where memory runs out" if code < 0 else f"exit code {code}"
        raise RuntimeError(f"a process that writes files ended with {how}") from None
    if isinstance(found, Exception):
        raise found
    return found


def _together(directory: Path, needed_bytes: int, action: Callable[[], _T]) -> list[_T]:
    """The results of all ranks; if one cannot write, all raise a UserError."""
    reason, results = None, []
    try:
        results = [action()]
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        reason = _write_error(error)
        if reason is None:
            raise
    gathered = gather_objects((reason, results))
    reasons = [reason for reason, _ in gathered if reason is not None]
    if not reasons:
        return [result for _, results in gathered for result in results]
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()
    space = describe_space(directory, needed_bytes)
    raise UserError(
        f"{directory}: cannot be written: {reasons[0]}; {space}. Older checkpoints are intact: "
        "make room, or give write access, and start again"
    )


def _write_error(error: BaseException) -> str | None:
    """Why a file could not be written; None for an error of another kind."""
    if isinstance(error, CheckpointException):  # the errors of all ranks, on the first rank only
        causes = [cause for cause, _ in error.failures.values()]
        return _write_error(causes[0]) if causes else "another rank failed to write"
    known = isinstance(error, OSError | SafetensorError)
    if known or any(words in str(error) for words in _WRITE_ERRORS):
        return str(error)
    return None


def _bytes_of(tree: dict[str, Any]) -> int:
    """The approximate size of the files that this rank writes."""
    return sum(
        item.data.nbytes + _BYTES_PER_TENSOR
        for item in nested_values(tree)
        if isinstance(item, ShardedTensor | ShardedTensorFactory)
        and is_main_replica(item.replica_id)
        and item.data is not None
    )
