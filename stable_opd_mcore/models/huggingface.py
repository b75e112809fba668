"""Read and write model directories in Hugging Face's form.

    load_hf(chunks, path)              # checks everything before it overwrites the first weight
    export_hf(chunks, directory)       # writes the whole directory or nothing

Exact in both directions. Not here: Megatron's distributed form (megatron_checkpoint.py), the table
of names and layouts (tensors.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import atomic_directory, describe_space
from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.weights import (
    architecture_of,
    fill_weights,
    is_finite,
    iter_hf_tensors,
    refuse_non_finite,
)
from stable_opd_mcore.parallel.world import gather_objects

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F32", "BF16", "F16", "F64")  # in safetensors' names
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def load_hf(chunks: Sequence[Module], path: str | Path) -> None:
    """Fill the chunks from the safetensors of a Hugging Face directory.

    A rank reads the part of each tensor that it holds, and nothing of other stages' layers.
    Collective over all ranks.

    Raises:
        UserError: a file or tensor is missing, a file is truncated, or a shape or a set of tensors
            belongs to another architecture: no weight has changed. Or a value is not finite: some
            weights have changed. The message names the file and the tensor.
    """
    with _Checkpoint(Path(path)) as checkpoint:
        checkpoint.check(architecture_of(chunks))
        with torch.no_grad():
            fill_weights(chunks, checkpoint.read)
        for fault in gather_objects(checkpoint.fault):
            if fault is not None:
                raise UserError(fault)


def check_hf(path: str | Path, architecture: Architecture) -> None:
    """Check the names, shapes and types of all tensors in a directory; no value is read.

    Raises:
        UserError: as `load_hf`, but for values.
    """
    with _Checkpoint(Path(path)) as checkpoint:
        checkpoint.check(architecture)


def export_hf(
    chunks: Sequence[Module],
    directory: str | Path,
    *,
    save_tokenizer: Callable[[Path], object] = lambda _: None,
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Write config.json and safetensors that `transformers` loads, in the weights' own precision.

    Collective over all ranks; rank 0 writes. An existing `directory` is replaced once the new one
    is complete.

    Args:
        save_tokenizer: writes the tokenizer's files into the directory it is given.
        max_file_bytes: the most bytes of a file that holds several tensors.

    Raises:
        UserError: a weight is not finite, or the directory cannot be written.
    """
    refuse_non_finite(chunks, f"{directory} is not written")
    partial = writer = None
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(_naming_write_errors(Path(directory), chunks))
            partial = stack.enter_context(atomic_directory(Path(directory)))
            writer = _ShardWriter(partial, max_file_bytes)
        for name, tensor in iter_hf_tensors(chunks):
            if writer is not None:
                writer.add(name, tensor)
        if writer is not None and partial is not None:
            writer.finish()
            write_config(architecture_of(chunks), unwrap(chunks[0]).config.params_dtype, partial)
            save_tokenizer(partial)
    dist.barrier()


@contextmanager
def _naming_write_errors(directory: Path, chunks: Sequence[Module]) -> Iterator[None]:
    """Turn an error of writing into a UserError with the space that the export needs."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        architecture, dtype = architecture_of(chunks), unwrap(chunks[0]).config.params_dtype
        needed_bytes = dtype.itemsize * sum(
            math.prod(tensors.hf_shape(name, architecture))
            for entry in tensors.canonical_parameters(architecture)
            for name in entry.hf_names
        )
        space = describe_space(directory, needed_bytes)
        raise UserError(f"{directory}: cannot be written: {error}; {space}") from error


class _Checkpoint:
    """The safetensors files of a directory, each opened when its first tensor is read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self.fault: str | None = None  # the first tensor read with a value that is not finite

    def __enter__(self) -> _Checkpoint:
        index = self._directory / _INDEX
        if index.is_file():
            try:
                self._file_of = dict(json.loads(index.read_bytes())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(f"{index}: not an index of safetensors files ({error})") from None
        elif (self._directory / _SINGLE).is_file():
            self._file_of = dict.fromkeys(self._handle(_SINGLE).keys(), _SINGLE)
        else:
            raise UserError(f"{self._directory}: has neither {_SINGLE} nor {_INDEX}")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.clear()

    def check(self, architecture: Architecture) -> None:
        """Refuse a missing, misshapen or additional tensor; every rank checks all of them."""
        wanted = {
            name: tensors.hf_shape(name, architecture)
            for entry in tensors.canonical_parameters(architecture)
            for name in entry.hf_names
        }
        hint = (
            "is this the checkpoint of another architecture? The model is "
            f"{architecture.model_type} with {architecture.num_layers} layers "
            f"of {architecture.hidden_size}"
        )
        for name, shape in wanted.items():
            if name not in self._file_of:
                raise UserError(f"{self._directory}: tensor {name} is missing; {hint}")
            view = self._view(name)
            found, dtype = tuple(view.get_shape()), view.get_dtype()
            if found != shape:
                raise UserError(
                    f"{self._path(name)}: tensor {name} has shape {found}, expected {shape}; {hint}"
                )
            if dtype not in _DTYPES:
                raise UserError(
                    f"{self._path(name)}: tensor {name} has dtype {dtype}, expected one of "
                    f"{', '.join(_DTYPES)}; convert quantized weights first"
                )
        ignored = {"lm_head.weight"} if architecture.tied else set()
        for name in self._file_of.keys() - wanted.keys() - ignored:
            if not name.endswith("rotary_emb.inv_freq"):
                raise UserError(
                    f"{self._path(name)}: tensor {name} has no place in the model; {hint}"
                )

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of each dimension of a tensor; only these bytes are read from the file."""
        tensor = self._handle(self._file_of[name]).get_slice(name)[part]
        if self.fault is None and not is_finite(tensor):
            self.fault = f"{self._path(name)}: tensor {name} holds NaN or infinity"
        return tensor

    def _view(self, name: str) -> Any:
        try:
            return self._handle(self._file_of[name]).get_slice(name)
        except SafetensorError:
            raise UserError(
                f"{self._path(name)}: tensor {name} is not in this file, but {_INDEX} lists it here"
            ) from None

    def _path(self, name: str) -> Path:
        return self._directory / self._file_of[name]

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._directory / file
            if not path.is_file():
                raise UserError(f"{path}: no such file, but {_INDEX} lists it")
            try:
                self._open[file] = safe_open(path, framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{path}: not readable, probably truncated ({path.stat().st_size} bytes): "
                    f"{error}; copy or download it again"
                ) from None
        return self._open[file]


class _ShardWriter:
    """Collects tensors into files of bounded size, and writes their index."""

    def __init__(self, directory: Path, max_file_bytes: int) -> None:
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_file_bytes:
            self._flush()
        self._pending[name] = tensor.to("cpu", copy=True)
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        self._flush()
        if len(self._files) == 1:
            os.rename(self._part(1), self._directory / _SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._files, start=1):
            file = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            os.rename(self._part(number), self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        self._files.append(list(self._pending))
        path = self._part(len(self._files))
        save_tensors(self._pending, path)
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number:05d}.safetensors"


def write_config(architecture: Architecture, dtype: torch.dtype, directory: Path) -> None:
    settings = {**architecture.source}
    settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = str(dtype).removeprefix(
        "torch."
    )
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer and generation settings of one model directory to another."""
    for file in _TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copy(source / file, directory / file)
