"""Read and write weights in Megatron's distributed checkpoint form, on any TP x PP layout.

A directory in this form holds config.json and can be used as a model directory.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.files.directory_save import save_directory, sharding
from stable_opd_mcore.models.files.manifest import MANIFEST, find_damage
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.weights import refuse_non_finite

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
_EXTRA_STATE = "_extra_state"


def is_megatron(path: str | Path) -> bool:
    """Whether a model directory holds a distributed checkpoint."""
    return (Path(path) / METADATA).is_file()


def require_manifest(path: str | Path) -> None:
    """Raise a UserError for a distributed checkpoint without a manifest."""
    if not (Path(path) / MANIFEST).is_file():
        raise UserError(
            f"{path}: a distributed checkpoint without {MANIFEST}, which `stable-opd` writes last: "
            "another program's, whose tensors may have other names, or an incomplete one. Export "
            "it to Hugging Face's form (config.json and safetensors) with that program, and give "
            "that directory"
        )


def weights_of(chunks: Sequence[Module]) -> dict[str, Any]:
    """The sharded weights of this rank's chunks, as Megatron saves and loads them.

    Without `_extra_state` of Transformer Engine's layers, which torch layers could not load, and
    without the factors of frozen matrices.
    """
    return {
        f"model{index}": {
            name: item
            for name, item in unwrap(chunk).sharded_state_dict(metadata=sharding()).items()
            if _EXTRA_STATE not in name
        }
        for index, chunk in enumerate(chunks)
    }


def set_weights(chunks: Sequence[Module], loaded: dict[str, Any]) -> None:
    """Copy what `dist_checkpointing.load` gave for `weights_of` into the chunks, all of it."""
    for index, chunk in enumerate(chunks):
        found = unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=False)
        missing = [
            name
            for name in found.missing_keys
            if _EXTRA_STATE not in name and not name.startswith("factors.")
        ]
        if missing or found.unexpected_keys:
            raise RuntimeError(f"not loaded: {missing}; without a place: {found.unexpected_keys}")


def save_weights(
    chunks: Sequence[Module], directory: Path, save_tokenizer: Callable[[Path], object]
) -> None:
    """Write weights, config.json, manifest and tokenizer into a new directory. Collective.

    Raises:
        UserError: the directory exists or cannot be written, or a weight is not finite.
    """
    if directory.exists():
        raise UserError(f"{directory} exists; name a directory that does not")
    refuse_non_finite(chunks, f"{directory} is not written")
    save_directory(weights_of(chunks), chunks, directory, describe=save_tokenizer)


def require_intact(path: str | Path) -> Path:
    """Raise a UserError for a distributed checkpoint that must not be read, as `load_weights` says.
    Collective."""
    path = Path(path)
    require_manifest(path)
    fault = find_damage(path)
    if fault is not None:
        raise UserError(f"{path}: damaged: {fault}; copy or convert it again")
    refuse_foreign_pickle(path)
    return path


def load_weights(chunks: Sequence[Module], path: str | Path) -> None:
    """Read a distributed checkpoint's weights into the chunks; any layout may have written it.

    Raises:
        UserError: as `require_manifest`; or a file is damaged, the metadata names foreign classes,
            a weight is missing, of another shape or not finite.
    """
    path = require_intact(path)
    refuse_factors(path)
    try:
        loaded: Any = dist_checkpointing.load(weights_of(chunks), str(path))
    except CheckpointException as error:
        causes = [str(cause) for cause, _ in error.failures.values()]
        raise UserError(f"{path}: not this model's weights ({causes[0]}); give its own") from error
    set_weights(chunks, loaded)
    refuse_non_finite(chunks, str(path))


def refuse_factors(path: str | Path) -> None:
    """Raise a UserError for a checkpoint of student.lora, or one with hostile metadata."""
    refuse_foreign_pickle(Path(path))
    if any(
        key.startswith("factors.") for key in dist_checkpointing.load_tensors_metadata(str(path))
    ):
        raise UserError(
            f"{path}: a checkpoint of student.lora, which holds the low-rank factors without the "
            "model under them; give the run's model/, in which they are merged, or the model that "
            "`stable-opd convert` makes of the checkpoint"
        )


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
            f"{path}: not a checkpoint's metadata ({error}); the file is damaged or hostile: copy "
            "the checkpoint again from a source that you trust"
        ) from error
