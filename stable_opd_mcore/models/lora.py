"""Low-rank factors on the matrices of a frozen model (LoRA): all that such a student trains.

    adapt(chunks, LoraConfig(), seed=0)    # the base is loaded, Student has not wrapped it
    with base_only(chunks): ...            # the frozen model, as if it had no factors

Every Hugging Face matrix of a layer, W [O, I], or every chosen one (models/files/adapted.py),
becomes W + scale · B A; routers and the gates of shared experts are left out. A [R, I] is drawn as
PEFT draws it, B [O, R] is zero. Where Megatron joins matrices, such as q, k and v, each has its own
pair or none, so the factors are the same as PEFT's. Where HF's files hold an expert's gate and up
as one matrix, they have one pair.

The pairs of one linear layer are `Factors` (models/layers/factors.py).

Letters: I inputs and O outputs of a matrix, R rank of its factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.adapted import LAYOUTS, adapted_shapes, chosen
from stable_opd_mcore.models.hidden_states import FactorList, unwrap
from stable_opd_mcore.models.layers.factors import Factors, Which, add_to_output, factors_of
from stable_opd_mcore.models.weights import (
    Exchange,
    architecture_of,
    described_parameters,
    named_generator,
    shards_of,
    weights_hash,
)

_GATES = (".router.", ".gate_weight")  # which experts a token passes, and how much of a shared one


def adapt(
    chunks: Sequence[Module], lora: LoraConfig, seed: int = 0, is_trained: bool = True
) -> None:
    """Freeze the chunks and give the chosen matrices of their layers a new pair of factors each.

    Args:
        lora: `path` is not read.
        seed: for the values of A, which do not depend on the layout.
        is_trained: False for a teacher's, of which a pipeline stage may have none.

    Raises:
        UserError: a matrix that has no factors yet, a name that no matrix has, or a pipeline stage
            without any factor to train.
    """
    adapted_shapes(architecture_of(chunks), lora.matrices)  # refuses unknown names
    if is_trained:
        _require_some(chunks, lora)
    for model in map(unwrap, chunks):
        model.requires_grad_(False)
        model.factors.form = _form(lora, model.architecture)
        by_linear: dict[str, list[Factors]] = {}
        for name, weight, entry in list(described_parameters([model])):
            if not _is_adapted(name, weight, entry):
                continue
            names = chosen(entry, model.architecture, lora.matrices)
            if not names:
                continue
            pairs = tensors.of_factors(entry, model.architecture)
            rank = lora.rank_of(entry.is_expert)
            factors = Factors(model, weight, pairs, names, rank=rank, scale=lora.scale(rank))
            model.factors.append(factors)
            by_linear.setdefault(name.rpartition(".")[0], []).append(factors)
        for name, each in by_linear.items():
            hook = model.get_submodule(name).register_forward_hook(partial(add_to_output, each))
            for factors in each:
                factors.hook = hook
        if model.pre_process and model.config.recompute_granularity is not None:
            model.embedding.register_forward_hook(_require_gradient)
    fill_factors(chunks, lambda name, which, shape: _first_value(name, which, shape, seed))


def _form(lora: LoraConfig, architecture: Architecture) -> dict[str, Any]:
    """What a checkpoint says of the factors, as settings of student.lora."""
    form: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha}
    of_experts = [each for each in tensors.layer_parameters(architecture, 0) if each.is_expert]
    if any(chosen(each, architecture, lora.matrices) for each in of_experts):
        form["expert_rank"] = lora.rank_of(True)
    if lora.rslora:
        form["rslora"] = True
    return form if lora.matrices is None else form | {"matrices": sorted(lora.matrices)}


def _require_some(chunks: Sequence[Module], lora: LoraConfig) -> None:
    """Raise a UserError if a pipeline stage has no factor to train. All ranks find the same."""
    architecture, stages = architecture_of(chunks), unwrap(chunks[0]).pg_collection.pp.size()
    layers_per_chunk = architecture.num_layers // (stages * len(chunks))
    trained = {
        number // layers_per_chunk % stages
        for number in range(architecture.num_layers)
        for entry in tensors.layer_parameters(architecture, number)
        if chosen(entry, architecture, lora.matrices)
    }
    if len(trained) < stages:
        raise UserError(
            f"student.lora.matrices={list(lora.matrices or ())}: no layer of pipeline stage "
            f"{min(set(range(stages)) - trained)} has such a matrix, so nothing would be trained "
            "there; add a matrix that every stage has, or set a smaller parallel.pipeline"
        )


@torch.no_grad()
def merge(chunks: Sequence[Module]) -> None:
    """Add the factors to their matrices on this rank, and remove them from the chunks."""
    architecture = architecture_of(chunks)
    weights = {
        tensors.of_factors(entry, architecture).hf_names: weight
        for _, weight, entry in described_parameters(chunks)
    }
    for factors in factors_of(chunks):
        weight = weights[factors.entry.hf_names]
        weight.copy_(factors.added_to(weight))
        factors.hook.remove()
    for model in map(unwrap, chunks):
        model.factors = FactorList()


def set_apart(chunks: Sequence[Module]) -> list[Factors]:
    """Take the factors out of the chunks, which may then get others. They are switched off, and
    still compute inside `switched_on`."""
    every = factors_of(chunks)
    for factors in every:
        factors.requires_grad_(False).is_on = False
    for model in map(unwrap, chunks):
        model.factors = FactorList()
    return every


@contextmanager
def switched_on(every: Sequence[Factors], chunks: Sequence[Module]) -> Iterator[None]:
    """Inside the block, compute with these factors of `set_apart` in place of the chunks' own."""
    for factors in every:
        factors.is_on = True
    try:
        with base_only(chunks):
            yield
    finally:
        for factors in every:
            factors.is_on = False


def _is_adapted(name: str, weight: Tensor, entry: tensors.Parameter) -> bool:
    is_gate = any(part in name for part in _GATES)
    if weight.dim() != 2 or not name.startswith("decoder.layers.") or is_gate:
        return False
    if entry.layout not in LAYOUTS:
        raise UserError(
            f"student.lora: {entry.hf_names[0]} is of a kind ({entry.layout}) that has no factors "
            "yet, and without them it would not be trained; set student.lora=null"
        )
    return True


def _require_gradient(_module: Module, _inputs: object, output: Tensor) -> None:
    """Let the first layer's recompute run backward, though nothing below it is trained."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _first_value(name: str, which: Which, shape: tuple[int, int], seed: int) -> Tensor:
    if which == "B":
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=named_generator(seed, f"{name}:A"))


@torch.no_grad()
def fill_factors(
    chunks: Sequence[Module], source: Callable[[str, Which, tuple[int, int]], Tensor]
) -> None:
    """Fill this rank's factors from `source`: HF name of a matrix, A or B, shape -> all of it."""
    for factors in factors_of(chunks):
        part, size = factors.group.rank(), factors.num_parts
        for name, which, rows, own in factors.parts():
            outputs, inputs = tensors.hf_shape(name, unwrap(chunks[0]).architecture)
            shape = (factors.rank, inputs) if which == "A" else (outputs, factors.rank)
            piece, cut = source(name, which, shape)[rows], factors.cut_of(which)
            own.copy_(piece if cut is None else piece.chunk(size, dim=cut)[part])


def sharded_factors(
    chunks: Sequence[Module], values: Sequence[Tensor] = ()
) -> dict[str, ShardedTensor]:
    """The factors of this rank, as Megatron saves and loads them: by the HF names of matrices.

    Args:
        values: factors to save in place of the present ones, as `values_of` gives them.
    """
    found: dict[str, ShardedTensor] = {}
    saved = iter(values)
    groups = unwrap(chunks[0]).pg_collection
    for factors in factors_of(chunks):
        is_expert = factors.entry.is_expert
        copies = groups.expt_dp if is_expert else groups.dp_cp
        for name, which, rows, own in factors.parts():
            key, cut = _key(name, which, rows), factors.cut_of(which)
            part, size = factors.group.rank(), factors.num_parts
            offsets = [] if cut is None else [(cut, part, size)]
            found[key] = ShardedTensor.from_rank_offsets(
                key,
                next(saved) if values else own,
                *offsets,
                replica_id=(0, 0 if offsets or is_expert else part, copies.rank()),
            )
    return found


@torch.no_grad()
def set_factors(chunks: Sequence[Module], loaded: dict[str, Tensor]) -> None:
    """Copy what `dist_checkpointing.load` gave for `sharded_factors` into the factors."""
    for factors in factors_of(chunks):
        for name, which, rows, own in factors.parts():
            own.copy_(loaded[_key(name, which, rows)])


def _key(name: str, which: Which, rows: slice) -> str:
    """The name in a checkpoint of a piece of a factor."""
    return f"factors.{name}.{which}" + (f".{rows.start}" if rows.start else "")


def iter_factors(chunks: Sequence[Module]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """HF name of each matrix and its whole A and B, on this rank's device, in the order of the
    forward pass. Collective as `iter_hf_tensors`, and equal on all ranks.
    """
    local = {factors.entry.hf_names: factors for factors in factors_of(chunks)}
    architecture, lora = architecture_of(chunks), config_of(chunks)
    exchange = Exchange(chunks, list(local))

    def whole(entry: tensors.Parameter) -> list[Tensor]:
        factors = local[entry.hf_names]
        found: dict[tuple[str, Which], list[Tensor]] = {}
        for name, which, _, own in factors.parts():
            cut = factors.cut_of(which)
            shards = [own.detach()] if cut is None else shards_of(own.detach(), factors.group)
            found.setdefault((name, which), []).append(torch.cat(shards, dim=cut or 0))
        return [torch.cat(pieces) for pieces in found.values()]

    for parameter in tensors.canonical_parameters(architecture):
        entry = tensors.of_factors(parameter, architecture)
        if not exchange.knows(entry):
            continue
        rank, names = lora.rank_of(entry.is_expert), chosen(parameter, architecture, lora.matrices)
        shapes = [tensors.hf_shape(name, architecture) for name in names]
        both = [shape for out, inp in shapes for shape in ((rank, inp), (out, rank))]
        found = list(exchange.everywhere(entry, partial(whole, entry), both))
        yield from zip(names, found[::2], found[1::2], strict=True)


def form_of(chunks: Sequence[Module]) -> dict[str, Any]:
    """The form of the factors, as settings of student.lora; empty where all weights are trained."""
    return dict(unwrap(chunks[0]).factors.form)


def config_of(chunks: Sequence[Module]) -> LoraConfig:
    """The form of the factors, which the chunks must have."""
    return LoraConfig(**form_of(chunks))


def values_of(chunks: Sequence[Module]) -> list[Tensor]:
    """A copy of this rank's factors."""
    return [own.detach().clone() for each in factors_of(chunks) for *_, own in each.parts()]


@contextmanager
def factors_as(chunks: Sequence[Module], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, compute with these factors, which `values_of` has copied."""
    every = [own for factors in factors_of(chunks) for *_, own in factors.parts()]
    trained = [own.data for own in every]
    for own, value in zip(every, values, strict=True):
        own.data = value
    try:
        yield
    finally:
        for own, value in zip(every, trained, strict=True):
            own.data = value


def base_hash(chunks: Sequence[Module]) -> str | None:
    """Hash of the weights under the factors; None if all weights are trained. Collective."""
    if not factors_of(chunks):
        return None
    with base_only(chunks):
        return weights_hash(chunks)


@contextmanager
def base_only(chunks: Sequence[Module]) -> Iterator[None]:
    """Inside the block, leave the factors out of forward passes and of `iter_hf_tensors`."""
    every = factors_of(chunks)
    before = [factors.is_on for factors in every]
    for factors in every:
        factors.is_on = False
    try:
        yield
    finally:
        for factors, is_on in zip(every, before, strict=True):
            factors.is_on = is_on
