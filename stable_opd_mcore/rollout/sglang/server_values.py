"""What a server holds in a parameter whose checksum differs, next to what the trainer has.

The server writes its copy into a file of the run directory (serving/launch_server.py), where the
trainer reads it, so only servers that `stable-opd` started, and that see the directory, show their
values. Both copies stay in that directory. Not here: the checksums (checksums.py), and what follows
from a difference (publisher.py).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.models.weights import architecture_of, iter_hf_tensors
from stable_opd_mcore.rollout.sglang.checksums import Difference, ExpectedChecksums, as_held
from stable_opd_mcore.rollout.sglang.sync import begin_update, end_update
from stable_opd_mcore.rollout.sglang.transports import NOT_THE_DRAFT, Target
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import ATTEMPTS, RefusedRequest, ServerFailure, SglangClient
from stable_opd_mcore.serving.command import VALUES_WRITER

_NEIGHBOURS = 2  # values that are shown on each side of the first difference


class _Hidden(Exception):
    """The server does not show its values; the message says why."""


class _HeldParameter(ExpectedChecksums):
    """After `add` of every tensor, `per_rank_values` holds one parameter of each tensor rank."""

    def __init__(self, name: str, tensor_size: int, chunks: Sequence[Module]) -> None:
        on_gpu = next(chunks[0].parameters()).is_cuda
        super().__init__(architecture_of(chunks), tensor_size, on_gpu=on_gpu)
        self._name = name
        self.per_rank_values: list[Tensor] = []

    def _enter(self, name: str, pieces: Iterable[Sequence[Tensor]]) -> None:
        if name == self._name:
            self.per_rank_values = [
                torch.cat([shard.detach().flatten().cpu() for shard in shards]) for shards in pieces
            ]


@dataclass(frozen=True)
class Suspect:
    """A server with a parameter whose checksum differs."""

    target: Target
    difference: Difference


def compare_values(
    chunks: Sequence[Module], suspects: Sequence[Suspect], folder: Path, dtype: torch.dtype
) -> dict[str, str]:
    """By server, what differs in the values of its first parameter with another checksum.

    Takes part in gathering all tensors once, so every rank that took part in the push calls it;
    only the sender has suspects.
    """
    ours = {
        (each.target.tensor, each.difference.parameter): _HeldParameter(
            each.difference.parameter, each.target.tensor, chunks
        )
        for each in suspects
    }
    for name, tensor in iter_hf_tensors(chunks):
        for held in ours.values():
            held.add(name, as_held(name, tensor, dtype, architecture_of(chunks)))
    return {
        each.target.name: _compared(
            each, ours[each.target.tensor, each.difference.parameter], folder
        )
        for each in suspects
    }


def _compared(suspect: Suspect, held: _HeldParameter, folder: Path) -> str:
    rank, name = suspect.difference.rank, suspect.difference.parameter
    assert rank is not None
    if not held.per_rank_values:
        return f"the trainer has no {name}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        theirs = _server_values(suspect.target, name, folder)[rank]
    except (_Hidden, ServerFailure, RefusedRequest, OSError) as error:
        return f"its values of {name} are not shown: {error}"
    file = folder / f"{suspect.target.name}_rank_{rank}_{name}.safetensors"
    values = {"trainer": held.per_rank_values[rank]} | (
        {} if theirs is None else {"server": theirs}
    )
    save_tensors(values, file)
    if theirs is None:
        return f"the server has no {name}"
    return f"{name} of rank {rank}, {first_difference(held.per_rank_values[rank], theirs)}; {file}"


def first_difference(ours: Tensor, theirs: Tensor) -> str:
    """Where two parameters differ, bit for bit, with their values there and next to it.

    Args:
        ours: flat.
        theirs: in the server's shape.
    """
    shape, flat = list(theirs.shape), theirs.flatten()
    if (ours.dtype, ours.numel()) != (flat.dtype, flat.numel()):
        return (
            f"{flat.dtype} {shape} in the server, {ours.numel():,} values of {ours.dtype} in the "
            "trainer"
        )
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    different = (ours.view(word) != flat.view(word)).nonzero().flatten()
    if not len(different):
        return (
            f"{flat.dtype} {shape}: every value is the same, so only the checksums are computed in "
            "different ways, and rollout.sglang.verify=warn is safe"
        )
    first = int(different[0])
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), shape)]
    return (
        f"{flat.dtype} {shape}: {len(different):,} of {flat.numel():,} values differ, the first at "
        f"{place}; there the trainer has {_around(first, ours)}, the server {_around(first, flat)}"
    )


def _around(place: int, flat: Tensor) -> str:
    """The value at a place in brackets, and its neighbours."""
    begin = max(0, place - _NEIGHBOURS)
    near = flat[begin : place + _NEIGHBOURS + 1].float().tolist()
    texts = [f"{value:.6g}" for value in near]
    texts[place - begin] = f"[{texts[place - begin]}]"
    return " ".join(texts)


def _server_values(target: Target, name: str, folder: Path) -> Mapping[int, Tensor | None]:
    """The parameter of each tensor rank. Raises _Hidden, ServerFailure or RefusedRequest."""
    client = target.client
    if VALUES_WRITER not in _weight_loaders(client):
        raise _Hidden("the server was not started by `stable-opd`")
    files = [folder.resolve() / f"{target.name}_rank_{rank}.pt" for rank in range(target.tensor)]
    for file in files:
        file.unlink(missing_ok=True)
    begin_update(client)
    empty = torch.empty(0)
    body = {  # each tensor rank reads the names of its own entry, and no tensor
        "serialized_named_tensors": [
            base64.b64encode(pickle.dumps([(str(file), empty), (name, empty)])).decode()
            for file in files
        ],
        "load_format": VALUES_WRITER,
        "flush_cache": False,
        **NOT_THE_DRAFT,
    }
    try:
        client.call("POST", "/update_weights_from_tensor", body, timeouts.BUCKET)
    finally:
        end_update(client)
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise _Hidden(f"it did not write {missing[0]}: its log says why, or it runs elsewhere")
    found = {rank: torch.load(file) for rank, file in enumerate(files)}
    for file in files:
        file.unlink()
    return found


def _weight_loaders(client: SglangClient) -> Sequence[str]:
    info = client.call("GET", "/server_info", None, timeouts.QUESTION, attempts=ATTEMPTS)
    return info.get("custom_weight_loader") or () if isinstance(info, dict) else ()
