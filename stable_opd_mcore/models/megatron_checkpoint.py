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
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.huggingface import write_config
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.save_helper import start_save_helper

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
    """Write weights and config.json into a new directory, on all ranks together.

    Args:
        save_tokenizer: writes the tokenizer's files into the directory it is given.

    Raises:
        UserError: the directory exists.
    """
    if directory.exists():
        raise UserError(f"{directory} exists; name a directory that does not")
    partial = directory.with_name(f"partial-{directory.name}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    save_sharded(weights_of(chunks), partial)
    dist.barrier()
    if dist.get_rank() == 0:
        describe_weights(chunks, partial)
        save_tokenizer(partial)
        partial.rename(directory)
    dist.barrier()


def save_sharded(tree: dict[str, Any], directory: Path) -> None:
    """Write sharded tensors into an existing directory, on all ranks together."""
    if filesystem_async._results_queue is None:  # Megatron's own helper outlives a killed rank
        filesystem_async._results_queue = start_save_helper()
    dist_checkpointing.save(tree, str(directory), content_metadata=sharding())


def describe_weights(chunks: Sequence[Module], directory: Path) -> None:
    """Write the config.json of these weights."""
    dtype = unwrap(chunks[0]).config.params_dtype
    write_config(architecture_of(chunks), dtype, directory)


def load_weights(chunks: Sequence[Module], path: str | Path) -> None:
    """Read a distributed checkpoint's weights into the chunks; any layout may have written it.

    Raises:
        UserError: the metadata is damaged or names foreign classes.
    """
    refuse_foreign_pickle(Path(path))
    loaded: Any = dist_checkpointing.load(weights_of(chunks), str(path))
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"])


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
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise UserError(
            f"{path}: not a checkpoint's metadata ({error}); the file may be hostile"
        ) from error
