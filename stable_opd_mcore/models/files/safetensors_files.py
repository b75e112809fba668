"""The safetensors files of a model directory in Hugging Face's form, read by the model's tensors.

Nothing is written here (huggingface.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.json_files import MIB, read_json_object
from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files import mxfp4
from stable_opd_mcore.models.files.expert_stacks import are_stacked, file_shapes, place
from stable_opd_mcore.models.weights import is_finite

Change = Callable[[str, Tensor], Tensor]  # a tensor's name and the tensor -> another of its form
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BF16 = "BF16"
_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".safetensors"}
_BLOCKS, _ROWS = 16, 64  # parts of the head that are compared with a tied embedding
_INDEX_BYTES = 64 * MIB  # experts that are not stacked have many names
_AGAIN = "download the model again"
_DTYPES = ("F32", BF16, "F16", "F64")  # safetensors' names


def weight_files(directory: Path) -> set[str]:
    """The names of the weight files in a directory, in any program's format."""
    return {path.name for path in directory.iterdir() if path.suffix in _WEIGHTS}


class TensorFiles:
    """The safetensors files of a directory. The tensors are those that the files hold; the index
    says only which files these are."""

    def __init__(
        self, directory: Path, architecture: Architecture, change: Change | None = None
    ) -> None:
        self.directory, self._architecture, self._change = directory, architecture, change
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self.stacks_experts = False  # known once the files' names are
        self.fault: str | None = None  # the first tensor read with a value that is not finite

    def __enter__(self) -> TensorFiles:
        index, single = self.directory / INDEX, self.directory / SINGLE
        if (self.directory / "adapter_config.json").is_file():
            raise UserError(
                f"{self.directory}: holds adapter_config.json; an adapter is not read here, and "
                "the weights without it are another model. Merge it into the weights, give it as "
                "student.lora.path, or move its files away"
            )
        if index.is_file():
            self._read_index(index)
            if single.is_file() and SINGLE not in self._file_of.values():
                raise UserError(
                    f"{self.directory}: holds two sets of weights, {SINGLE} and the files of "
                    f"{INDEX}; move away the wrong one"
                )
            self._add_unlisted()
        elif single.is_file():
            self._file_of = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise UserError(f"{self.directory}: neither {SINGLE} nor {INDEX}; download the weights")
        self.stacks_experts = are_stacked(self._architecture, self._file_of)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.clear()

    def _read_index(self, index: Path) -> None:
        listed = read_json_object(index, _INDEX_BYTES, _AGAIN).get("weight_map")
        if not isinstance(listed, dict):
            raise UserError(f"{index}: weight_map={listed!r:.60} should be an object; {_AGAIN}")
        for name, file in listed.items():
            if not isinstance(file, str):
                raise UserError(
                    f"{index}: {name}={file!r:.60} should be the name of a file; {_AGAIN}"
                )
        self._file_of = listed

    def _add_unlisted(self) -> None:
        """Add the tensors that the index leaves out, as transformers does; refuse one that two
        files hold."""
        names_in = {file: self._handle(file).keys() for file in sorted(set(self._file_of.values()))}
        for file, names in names_in.items():
            for name in names:
                other = self._file_of.setdefault(name, file)
                if other != file and name in names_in[other]:
                    raise UserError(
                        f"{self.directory}: {other} and {file} both hold tensor {name}; {_AGAIN}, "
                        "or remove it from the wrong one"
                    )

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
            if name == tensors.HEAD not in self._file_of:
                raise UserError(
                    f"{self.directory}: tensor {name} is missing, but config.json does not say "
                    "tie_word_embeddings=true, with which the embedding is the head; set that if "
                    "the model was trained so, else give a complete checkpoint"
                )
            if name not in self._file_of:
                raise UserError(f"{self.directory}: tensor {name} is missing; {hint}")
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
            carried = name.startswith(architecture.carried)
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
        return BF16 if dtype == mxfp4.DTYPE else dtype

    def _file_name(self, name: str) -> str:
        """The tensor in the files that holds one of the model's, or its blocks in MXFP4."""
        found = place(name, self._architecture, self.stacks_experts)
        if found is None:
            return name
        blocks, _ = mxfp4.parts_of(found.stack)
        return blocks if blocks in self._file_of else found.stack

    def carried(self) -> list[str]:
        """The tensors that belong to other parts of the model; a UserError if one is missing."""
        carried = self._architecture.carried
        names = sorted(name for name in self._file_of if name.startswith(carried))
        for name in names:
            self._view(name)
        return names

    def copy(self, name: str) -> Tensor:
        """A whole tensor as it is in the file, or as `change` makes it."""
        tensor = self._handle(self._file_of[name]).get_tensor(name)
        return tensor if self._change is None else self._change(name, tensor)

    def unread(self) -> list[str]:
        """Files of weights in the directory that hold none of the model's tensors."""
        return sorted(weight_files(self.directory) - set(self._file_of.values()))

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of each dimension of a tensor. Only these bytes are read from the file; where a
        stack interleaves an expert's gate and up, both are read."""
        found = place(name, self._architecture, self.stacks_experts)
        assert found is None or part == (slice(None),), "an expert is not cut"
        name = self._file_name(name)
        view = self._view(name)
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
                f"{self._path(name)}: tensor {name} is not in this file, but {INDEX} lists it "
                "here; download both again"
            ) from None

    def _path(self, name: str) -> Path:
        return self.directory / self._file_of[name]

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            if not path.is_file():
                raise UserError(f"{path}: no such file, but {INDEX} lists it; download it")
            try:
                self._open[file] = safe_open(path, framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{path}: not readable, probably truncated ({path.stat().st_size} bytes): "
                    f"{error}; copy or download it again"
                ) from None
        return self._open[file]
