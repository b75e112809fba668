"""Read and write weights in Megatron's distributed checkpoint form, on any TP x PP layout.

A directory in this form holds config.json and can be used as a model directory. A run's checkpoint
(train/checkpoint.py) is such a directory too, and also holds optimizer and counters. Not here:
Hugging Face's form (huggingface.py).
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Sequence
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
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module

from stable_opd_mcore.atomic_files import describe_space
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.huggingface import write_config
from stable_opd_mcore.models.manifest import (
    Entries,
    find_damage,
    has_manifest,
    hash_own_files,
    write_manifest,
)
from stable_opd_mcore.models.weights import architecture_of, refuse_non_finite
from stable_opd_mcore.parallel.save_helper import start_save_helper
from stable_opd_mcore.parallel.world import gather_objects

METADATA = ".metadata"
# The classes in the pickle of torch's checkpoint metadata; any other name is refused.
METADATA_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
METADATA_NAMES = {
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
}
_BYTES_PER_TENSOR = 3 * 2**10  # of torch's zip format and of the metadata
# RuntimeErrors of torch's and of Megatron's file writers.
_WRITE_ERRORS = ("inline_container.cc", "PytorchStreamWriter", "Worker failure: [Errno")


def is_megatron(path: str | Path) -> bool:
    """Whether a model directory holds a distributed checkpoint."""
    return (Path(path) / METADATA).is_file()


def sharding() -> dict[str, Any]:
    """Megatron's options for saving and loading, with which any layout reads the checkpoint.

    A new dict each time: Megatron adds the process groups of the layout to it.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }


def weights_of(chunks: Sequence[Module]) -> dict[str, Any]:
    """The sharded state of this rank's chunks, as Megatron saves and loads it."""
    return {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=sharding())
        for index, chunk in enumerate(chunks)
    }


def save_weights(
    chunks: Sequence[Module], directory: Path, save_tokenizer: Callable[[Path], object]
) -> None:
    """Write weights, config.json and manifest into a new directory, on all ranks together.

    Args:
        save_tokenizer: writes the tokenizer's files into the directory it is given.

    Raises:
        UserError: the directory exists or cannot be written, or a weight is not finite.
    """
    if directory.exists():
        raise UserError(f"{directory} exists; name a directory that does not")
    refuse_non_finite(chunks, f"{directory} is not written")
    save_directory(weights_of(chunks), chunks, directory, describe=save_tokenizer)


def save_directory(
    tree: dict[str, Any],
    chunks: Sequence[Module],
    directory: Path,
    describe: Callable[[Path], object],
    add_own_files: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write a checkpoint directory on all ranks; one rename makes it appear, complete.

    Args:
        tree: the sharded tensors, as `weights_of` gives them, and others.
        chunks: the model, for config.json.
        describe: called on rank 0 to write the small files.
        add_own_files: called on every rank to write files with the rank's number in their names.

    Raises:
        UserError: a rank could not write. The message has the space that was missing. An older
            `directory` is untouched.
    """
    partial = directory.with_name(f"partial-{directory.name}")
    needed_bytes = sum(gather_objects(_bytes_of(tree)))
    entries: Entries = {}

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        probe = partial / "probe"  # a full disk fails here, before ranks wait for each other
        probe.write_bytes(bytes(2**14))
        probe.unlink()

    def write() -> None:
        if filesystem_async._results_queue is None:  # Megatron's own helper outlives a killed rank
            filesystem_async._results_queue = start_save_helper()
        dist_checkpointing.save(tree, str(partial), content_metadata=sharding())
        add_own_files(partial)
        entries.update(hash_own_files(partial))

    def finish() -> None:
        write_config(architecture_of(chunks), unwrap(chunks[0]).config.params_dtype, partial)
        describe(partial)
        write_manifest(partial, gathered)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)

    is_first = dist.get_rank() == 0
    _write_together(prepare if is_first else None, partial, needed_bytes)
    _write_together(write, partial, needed_bytes)
    gathered = gather_objects(entries)
    _write_together(finish if is_first else None, partial, needed_bytes)


def _write_together(action: Callable[[], None] | None, partial: Path, needed_bytes: int) -> None:
    """Run `action` on this rank; if any rank cannot write, all clean up and raise UserError."""
    reason = None
    try:
        if action is not None:
            action()
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        reason = _write_error(error)
        if reason is None:
            raise
    reasons = [reason for reason in gather_objects(reason) if reason is not None]
    if not reasons:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    space = describe_space(partial, needed_bytes)
    raise UserError(
        f"{partial}: cannot be written: {reasons[0]}; {space}. Older checkpoints are intact"
    )


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


def load_weights(chunks: Sequence[Module], path: str | Path) -> None:
    """Read a distributed checkpoint's weights into the chunks; any layout may have written it.

    Raises:
        UserError: a file is damaged, the metadata names foreign classes, a weight is not finite.
    """
    path = Path(path)
    fault = find_damage(path) if has_manifest(path) else None
    if fault is not None:
        raise UserError(f"{path}: damaged: {fault}; copy or convert it again")
    refuse_foreign_pickle(path)
    loaded: Any = dist_checkpointing.load(weights_of(chunks), str(path))
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"])
    refuse_non_finite(chunks, str(path))


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in METADATA_NAMES
        if known or (module.startswith(METADATA_MODULES) and "." not in name):
            found = super().find_class(module, name)
            if known or isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def refuse_foreign_pickle(checkpoint: Path) -> None:
    """Refuse metadata that names any class but its own: torch unpickles it without restriction."""
    path = checkpoint / METADATA
    try:
        with path.open("rb") as file:
            _MetadataUnpickler(file).load()
    except Exception as error:  # unpickling damaged bytes can raise any exception
        raise UserError(
            f"{path}: not a checkpoint's metadata ({error}); the file is damaged or hostile"
        ) from error
