"""Read and write model directories in Hugging Face's form, exact in both directions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import atomic_directory, describe_space
from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.expert_stacks import file_shapes, stacked
from stable_opd_mcore.models.files.megatron_checkpoint import is_megatron
from stable_opd_mcore.models.files.safetensors_files import BF16, INDEX, SINGLE, Change, TensorFiles
from stable_opd_mcore.models.files.small_files import copy_image_settings, write_config
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.weights import (
    architecture_of,
    fill_weights,
    iter_hf_tensors,
    refuse_non_finite,
)
from stable_opd_mcore.parallel.world import gather_objects


def load_hf(chunks: Sequence[Module], path: str | Path) -> None:
    """Fill the chunks from the safetensors of a Hugging Face directory.

    A rank reads only its part of each tensor, and no layer of other stages.
    Collective over all ranks.

    Raises:
        UserError: a file or tensor is missing, a file is truncated, or a shape or a set of tensors
            belongs to another architecture: no weight has changed. Or a value is not finite: some
            weights have changed. The message names the file and the tensor.
    """
    with TensorFiles(Path(path), architecture_of(chunks)) as files:
        files.check()
        with torch.no_grad():
            fill_weights(chunks, files.read)
        for fault in gather_objects(files.fault):
            if fault is not None:
                raise UserError(fault)


def check_hf(path: str | Path, architecture: Architecture) -> list[str]:
    """Check the names, shapes and types of all tensors; returns the files of weights that nothing
    reads. Raises what `load_hf` does, except for values that are not finite.
    """
    with TensorFiles(Path(path), architecture) as files:
        files.check()
        return files.unread()


def read_head(
    path: str | Path, architecture: Architecture, ranges: Sequence[slice]
) -> list[Tensor]:
    """These ranges of the output head's rows; it may be the embedding. Raises as `check_hf`."""
    name = next(iter(tensors.hf_shapes(architecture))) if architecture.tied else tensors.HEAD
    with TensorFiles(Path(path), architecture) as files:
        files.check()
        return [files.read(name, (rows,)) for rows in ranges]


STORED_AS = {"bfloat16": BF16, "float16": "F16", "float32": "F32", "float64": "F64"}


def stored_dtypes(path: str | Path, architecture: Architecture) -> set[str]:
    """The types of the model's tensors in a directory, by safetensors' names. Tensors that every
    model keeps in fp32 do not count.

    The files of Hugging Face's form decide, since config.json may name another type. That of a
    Megatron checkpoint was written with its weights; empty if it names none.
    """
    if is_megatron(path):
        dtype: str = architecture.source.get("dtype") or architecture.source.get("torch_dtype", "")
        return {STORED_AS.get(dtype, dtype)} if dtype else set()
    entries = tensors.canonical_parameters(architecture)
    with TensorFiles(Path(path), architecture) as files:
        return {
            files.dtype(name)
            for entry in entries
            if not entry.fp32
            for name in entry.hf_names
            if files.holds(name)
        }


def require_base(path: str | Path, architecture: Architecture) -> None:
    """Raise a UserError for a directory without the tensors that an export must copy."""
    carried = architecture.carried
    if carried and not any((Path(path) / file).is_file() for file in (SINGLE, INDEX)):
        raise UserError(
            f"{path}: neither {SINGLE} nor {INDEX}; an exported {architecture.model_type} model "
            f"also has tensors that are not trained ({', '.join(carried)}), which are copied from "
            "there: name the directory of the base model in Hugging Face's form"
        )


def export_hf(
    chunks: Sequence[Module],
    directory: str | Path,
    *,
    base: str | Path | None = None,
    change: Change | None = None,
    save_tokenizer: Callable[[Path], object] = lambda _: None,
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Write config.json and safetensors that `transformers` loads, in the weights' own precision.

    Collective over all ranks; rank 0 writes. An existing `directory` is replaced once the new one
    is complete, with the tokenizer's files from `save_tokenizer`.

    Args:
        base: the model directory where training began. Its tensors of other parts of the model, and
            its settings for images, are copied. Weights that every model keeps in fp32 are written
            in the type that they have there. The experts of a layer are stacked if they are stacked
            there.
        change: what becomes of a tensor that is copied; None: it stays.

    Raises:
        UserError: a weight is not finite, `base` cannot be read, or the directory cannot be
            written. An existing `directory` is untouched.
    """
    directory, architecture = Path(directory), architecture_of(chunks)
    refuse_non_finite(chunks, f"{directory} is not written")
    source = None
    if base is not None and architecture.carried:
        source = TensorFiles(Path(base), architecture, change)
        _require_readable(source, f"{directory} is not written")
    if dist.get_rank() == 0:
        with source or nullcontext():
            _write_model(chunks, directory, source, save_tokenizer, max_file_bytes)
    else:
        for _ in iter_hf_tensors(chunks):
            pass
    dist.barrier()


def _require_readable(base: TensorFiles, what: str) -> None:
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
    base: TensorFiles | None,
    save_tokenizer: Callable[[Path], object],
    max_file_bytes: int,
) -> None:
    """Gather and write the model, on rank 0.

    Args:
        base: the opened files of the model that tensors are copied from; None: none are copied.
    """
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
            if base is not None:
                copy_image_settings(base.directory, partial)
            save_tokenizer(partial)
    except (OSError, SafetensorError) as error:
        space = f"{describe_space(directory, sum(sizes.values()))}; make room there"
        raise UserError(f"{directory}: cannot be written: {error}; {space}") from error


def _export_types(
    architecture: Architecture, dtype: torch.dtype, base: TensorFiles | None
) -> dict[str, torch.dtype]:
    """The type in which each tensor is written."""

    def is_bf16(name: str) -> bool:
        return base is not None and base.holds(name) and base.dtype(name) == BF16

    return {
        name: torch.float32 if entry.fp32 and not is_bf16(name) else dtype
        for entry in tensors.canonical_parameters(architecture)
        for name in entry.hf_names
    }


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
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if files[1:] else SINGLE
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in islice(whole, len(names))}
        assert list(kept) == names, "in the order of the forward pass"
        save_tensors(kept, directory / file)
        weight_map |= dict.fromkeys(names, file)
    assert next(whole, None) is None
    if files[1:]:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
