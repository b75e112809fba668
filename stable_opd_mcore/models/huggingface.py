"""Read and write model directories in Hugging Face's form, exact in both directions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
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
from stable_opd_mcore.models import mxfp4, tensors
from stable_opd_mcore.models.expert_stacks import are_stacked, file_shapes, place, stacked
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.small_files import write_config
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
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors")  # kinds of files of weights
_BLOCKS, _ROWS = 16, 64  # parts of the head that are compared with a tied embedding
_DTYPES = ("F32", "BF16", "F16", "F64")  # safetensors' names
_BF16 = "BF16"


def load_hf(chunks: Sequence[Module], path: str | Path) -> None:
    """Fill the chunks from the safetensors of a Hugging Face directory.

    A rank reads only its part of each tensor, and no layer of other stages.
    Collective over all ranks.

    Raises:
        UserError: a file or tensor is missing, a file is truncated, or a shape or a set of tensors
            belongs to another architecture: no weight has changed. Or a value is not finite: some
            weights have changed. The message names the file and the tensor.
    """
    with _Checkpoint(Path(path), architecture_of(chunks)) as checkpoint:
        checkpoint.check()
        with torch.no_grad():
            fill_weights(chunks, checkpoint.read)
        for fault in gather_objects(checkpoint.fault):
            if fault is not None:
                raise UserError(fault)


def check_hf(path: str | Path, architecture: Architecture) -> list[str]:
    """Check the names, shapes and types of all tensors; returns the files of weights that nothing
    reads. Raises what `load_hf` does, except for values that are not finite.
    """
    with _Checkpoint(Path(path), architecture) as checkpoint:
        checkpoint.check()
        return checkpoint.unread()


def read_head(
    path: str | Path, architecture: Architecture, ranges: Sequence[slice]
) -> list[Tensor]:
    """These ranges of the output head's rows; it may be the embedding. Raises as `check_hf`."""
    name = next(iter(tensors.hf_shapes(architecture))) if architecture.tied else tensors.HEAD
    with _Checkpoint(Path(path), architecture) as checkpoint:
        checkpoint.check()
        return [checkpoint.read(name, (rows,)) for rows in ranges]


def stored_dtypes(path: str | Path, architecture: Architecture) -> set[str]:
    """The types of the model's tensors in the files of a directory, by safetensors' names. Tensors
    that every model keeps in fp32 do not count."""
    entries = tensors.canonical_parameters(architecture)
    with _Checkpoint(Path(path), architecture) as checkpoint:
        return {
            checkpoint.dtype(name)
            for entry in entries
            if not entry.fp32
            for name in entry.hf_names
            if checkpoint.holds(name)
        }


def require_base(path: str | Path, architecture: Architecture) -> None:
    """Raise a UserError for a directory without the tensors that an export must copy."""
    carried = architecture.family.carried
    if carried and not any((Path(path) / file).is_file() for file in (_SINGLE, _INDEX)):
        raise UserError(
            f"{path}: neither {_SINGLE} nor {_INDEX}; an exported {architecture.model_type} model "
            f"also has tensors that are not trained ({', '.join(carried)}), which are copied from "
            "there: name the directory of the base model in Hugging Face's form"
        )


def export_hf(
    chunks: Sequence[Module],
    directory: str | Path,
    *,
    base: str | Path | None = None,
    save_tokenizer: Callable[[Path], object] = lambda _: None,
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Write config.json and safetensors that `transformers` loads, in the weights' own precision.

    Collective over all ranks; rank 0 writes. An existing `directory` is replaced once the new one
    is complete, with the tokenizer's files from `save_tokenizer`.

    Args:
        base: the model directory where training began. Its tensors of other parts of the model are
            copied, weights that every model keeps in fp32 are written in the type that they have
            there, and the experts of a layer are stacked if they are there.

    Raises:
        UserError: a weight is not finite, `base` cannot be read, or the directory cannot be
            written. An existing `directory` is untouched.
    """
    directory, architecture = Path(directory), architecture_of(chunks)
    refuse_non_finite(chunks, f"{directory} is not written")
    source = None
    if base is not None and architecture.family.carried:
        source = _Checkpoint(Path(base), architecture)
        _require_readable(source, f"{directory} is not written")
    if dist.get_rank() == 0:
        with source or nullcontext():
            _write_model(chunks, directory, source, save_tokenizer, max_file_bytes)
    else:
        for _ in iter_hf_tensors(chunks):
            pass
    dist.barrier()


def _require_readable(base: _Checkpoint, what: str) -> None:
    """Raise a UserError on all ranks if rank 0 cannot read what an export copies. Collective."""
    problem = None
    if dist.get_rank() == 0:
        try:
            with base:
                base.carried()
        except UserError as error:
            problem = str(error)
    problem = gather_objects(problem)[0]
    if problem is not None:
        raise UserError(
            f"{what}: the tensors that are not trained are copied from the base model, and "
            f"{problem}. Checkpoints are intact: restore the base model, and start again"
        )


def _write_model(
    chunks: Sequence[Module],
    directory: Path,
    base: _Checkpoint | None,
    save_tokenizer: Callable[[Path], object],
    max_file_bytes: int,
) -> None:
    """The part of `export_hf` on rank 0; `base` None: there is nothing to copy from it."""
    architecture, dtype = architecture_of(chunks), unwrap(chunks[0]).config.params_dtype
    types = _export_types(architecture, dtype, base)
    is_stacked = base.stacks_experts if base else architecture.family.stacked_experts
    shapes = file_shapes(architecture, is_stacked)
    whole = stacked(_typed(chunks, types), architecture, shapes, is_stacked)
    sizes = {
        name: math.prod(shape) * types.get(name, dtype).itemsize for name, shape in shapes.items()
    }
    if base is not None:
        carried = base.carried()
        sizes |= {name: base.copy(name).nbytes for name in carried}
        whole = chain(whole, ((name, base.copy(name)) for name in carried))
    try:
        with atomic_directory(directory) as partial:
            _write_tensors(whole, sizes, partial, max_file_bytes)
            write_config(architecture, dtype, partial)
            save_tokenizer(partial)
    except (OSError, SafetensorError) as error:
        space = f"{describe_space(directory, sum(sizes.values()))}; make room there"
        raise UserError(f"{directory}: cannot be written: {error}; {space}") from error


def _export_types(
    architecture: Architecture, dtype: torch.dtype, base: _Checkpoint | None
) -> dict[str, torch.dtype]:
    """The type in which each tensor is written."""
    types: dict[str, torch.dtype] = {}
    for entry in tensors.canonical_parameters(architecture):
        for name in entry.hf_names:
            is_bf16 = base is not None and base.holds(name) and base.dtype(name) == _BF16
            types[name] = torch.float32 if entry.fp32 and not is_bf16 else dtype
    return types


def _typed(chunks: Sequence[Module], types: dict[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in iter_hf_tensors(chunks):
        yield name, tensor.to(types[name])


def _write_tensors(
    whole: Iterator[tuple[str, Tensor]],
    sizes: dict[str, int],
    directory: Path,
    max_file_bytes: int,
) -> None:
    """Write all tensors, of these bytes, into files of bounded size, and the files' index."""
    files: list[list[str]] = [[]]
    room = max_file_bytes
    for name, size in sizes.items():
        if files[-1] and size > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(name)
        room -= size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if files[1:] else _SINGLE
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in islice(whole, len(names))}
        assert list(kept) == names, "in the order of the forward pass"
        save_tensors(kept, directory / file)
        weight_map |= dict.fromkeys(names, file)
    assert next(whole, None) is None
    if files[1:]:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _Checkpoint:
    """The safetensors files of a directory, each opened when its first tensor is read."""

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self._directory, self._architecture = directory, architecture
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self.stacks_experts = False  # known once the files' names are
        self.fault: str | None = None  # the first tensor read with a value that is not finite

    def __enter__(self) -> _Checkpoint:
        index, single = self._directory / _INDEX, self._directory / _SINGLE
        if (self._directory / "adapter_config.json").is_file():
            raise UserError(
                f"{self._directory}: holds adapter_config.json; an adapter is not read here, and "
                "the weights without it are another model. Merge it into the weights, give it as "
                "student.lora.path, or move its files away"
            )
        if index.is_file():
            try:
                self._file_of = dict(json.loads(index.read_bytes())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{index}: not an index of safetensors files ({error}); download it again"
                ) from None
            if single.is_file() and _SINGLE not in self._file_of.values():
                raise UserError(
                    f"{self._directory}: holds two sets of weights, {_SINGLE} and the files of "
                    f"{_INDEX}; move away the wrong one"
                )
        elif single.is_file():
            self._file_of = dict.fromkeys(self._handle(_SINGLE).keys(), _SINGLE)
        else:
            raise UserError(
                f"{self._directory}: neither {_SINGLE} nor {_INDEX}; download the weights"
            )
        self.stacks_experts = are_stacked(self._architecture, self._file_of)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.clear()

    def check(self) -> None:
        """Refuse a missing, misshapen or additional tensor; every rank checks all of them."""
        architecture = self._architecture
        shapes = file_shapes(architecture, self.stacks_experts)
        wanted = mxfp4.stored_shapes(shapes, self._file_of)
        hint = (
            f"the model is {architecture.model_type} with {architecture.num_layers} layers of "
            f"{architecture.hidden_size}: give a complete checkpoint of this architecture"
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
            allowed = (mxfp4.DTYPE,) if name.endswith(mxfp4.PARTS) else _DTYPES
            if dtype not in allowed:
                raise UserError(
                    f"{self._path(name)}: tensor {name} has dtype {dtype}, expected one of "
                    f"{', '.join(allowed)}; convert quantized weights first"
                )
        head = tensors.HEAD
        ignored = {head} if architecture.tied else set()
        for name in self._file_of.keys() - wanted.keys() - ignored:
            carried = name.startswith(architecture.family.carried)
            if not carried and not name.endswith("rotary_emb.inv_freq"):
                raise UserError(
                    f"{self._path(name)}: tensor {name} has no place in the model; {hint}"
                )
        embedding = next(iter(wanted))
        if architecture.tied and self.holds(head) and not self._repeats_embedding(embedding):
            raise UserError(
                f"{self._path(head)}: {head} differs from {embedding}, but config.json says "
                "tie_word_embeddings=true, with which it would not be read; set that to false, or "
                f"remove {head}"
            )

    def _repeats_embedding(self, name: str) -> bool:
        """Whether the head is the embedding, by blocks of rows, evenly spaced over both."""
        head, embedding = self._view(tensors.HEAD), self._view(name)
        rows = head.get_shape()[0]
        if head.get_shape() != embedding.get_shape():
            return False
        starts = {block * max(0, rows - _ROWS) // (_BLOCKS - 1) for block in range(_BLOCKS)}
        return all(torch.equal(head[at : at + _ROWS], embedding[at : at + _ROWS]) for at in starts)

    def holds(self, name: str) -> bool:
        return self._file_name(name) in self._file_of

    def dtype(self, name: str) -> str:
        dtype = self._view(self._file_name(name)).get_dtype()
        return _BF16 if dtype == mxfp4.DTYPE else dtype

    def _file_name(self, name: str) -> str:
        """The tensor in the files that holds one of the model's, or its blocks in MXFP4."""
        found = place(name, self._architecture, self.stacks_experts)
        if found is None:
            return name
        blocks, _ = mxfp4.parts_of(found.stack)
        return blocks if blocks in self._file_of else found.stack

    def carried(self) -> list[str]:
        """The tensors that belong to other parts of the model; a UserError if one is missing."""
        carried = self._architecture.family.carried
        names = sorted(name for name in self._file_of if name.startswith(carried))
        for name in names:
            self._view(name)
        return names

    def copy(self, name: str) -> Tensor:
        """A whole tensor as it is in the file."""
        return self._handle(self._file_of[name]).get_tensor(name)

    def unread(self) -> list[str]:
        """Files of weights in the directory that hold none of the model's tensors."""
        files = (path for path in self._directory.iterdir() if path.suffix in _OTHER_WEIGHTS)
        return sorted({path.name for path in files} - set(self._file_of.values()))

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of each dimension of a tensor; only these bytes are read from the file, and all
        of an expert's where it has gate and up in turn."""
        found = place(name, self._architecture, self.stacks_experts)
        name = self._file_name(name)
        view = self._handle(self._file_of[name]).get_slice(name)
        if found is None:
            tensor = view[part]
        elif name == found.stack:
            tensor = found.of(view)
        else:
            scales = self._view(mxfp4.parts_of(found.stack)[1])[found.expert]
            rows = view[found.expert][found.rows], scales[found.rows]
            tensor = mxfp4.dequantised(*rows)
        if self.fault is None and not is_finite(tensor):
            self.fault = f"{self._path(name)}: tensor {name} holds NaN or infinity; replace it"
        return tensor

    def _view(self, name: str) -> Any:
        try:
            return self._handle(self._file_of[name]).get_slice(name)
        except SafetensorError:
            raise UserError(
                f"{self._path(name)}: tensor {name} is not in this file, but {_INDEX} lists it "
                "here; download both again"
            ) from None

    def _path(self, name: str) -> Path:
        return self._directory / self._file_of[name]

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._directory / file
            if not path.is_file():
                raise UserError(f"{path}: no such file, but {_INDEX} lists it; download it")
            try:
                self._open[file] = safe_open(path, framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{path}: not readable, probably truncated ({path.stat().st_size} bytes): "
                    f"{error}; copy or download it again"
                ) from None
        return self._open[file]
