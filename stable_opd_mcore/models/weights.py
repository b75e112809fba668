"""The weights of a built model, by the names of Hugging Face's tensors: make, fill, copy, iterate.

Exact in both directions; padded vocabulary rows are zero when filled and are never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.errors import NotFiniteError
from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.tensor_cuts import join_parts, own_parts, unshard
from stable_opd_mcore.models.tensors import Parameter
from stable_opd_mcore.parallel.world import broadcast_object, gather_objects


@torch.no_grad()
def random_weights(chunks: Sequence[Module], seed: int) -> None:
    """Normal matrices, sinks and biases of a router's choice with the architecture's
    initializer_range; norms multiply by 1, biases are 0; the decay rates of a gated delta net as
    transformers chooses them.

    Each full tensor has its own seed, so the weights do not depend on the layout.
    """
    architecture = architecture_of(chunks)

    def random_part(name: str, part: tuple[slice, ...]) -> Tensor:
        shape = tensors.hf_shape(name, architecture)
        is_norm = name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")
        if name.endswith(".bias") or (is_norm and architecture.family.zero_centred_norms):
            return torch.zeros(shape)[part]
        generator = named_generator(seed, name)
        if name.endswith(".A_log"):
            return torch.empty(shape).uniform_(0.01, 16, generator=generator).log()[part]
        if len(shape) == 1 and not name.endswith((".sinks", ".e_score_correction_bias")):
            return torch.ones(shape)[part]
        full = torch.randn(shape, generator=generator)
        return full[part] * architecture.initializer_range

    fill_weights(chunks, random_part)


def named_generator(seed: int, name: str) -> torch.Generator:
    """A generator whose numbers depend on the seed and the name of what they fill."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def mark_shards(chunks: Sequence[Module]) -> None:
    """Mark the weights that are a tensor rank's shard, as Megatron does when it initialises them.

    The gradient norm counts an unmarked weight on the first rank only. Gradients of experts are
    summed over the ranks that hold the same experts, in a buffer of their own; on one expert rank
    too, so that its checkpoints have the form of every layout.
    """
    for _, weight, entry in described_parameters(chunks):
        marked = hasattr(weight, "tensor_model_parallel")
        if (entry.is_cut or entry.is_expert) and not marked:
            dimension = 1 if entry.layout == "columns" else 0
            set_tensor_model_parallel_attributes(weight, True, dimension, stride=1)
        if entry.is_expert:  # Megatron's attributes; it marks an expert's bias as the attention's
            weight.allreduce = weight.sequence_parallel = False  # pyright: ignore


def iter_hf_tensors(chunks: Sequence[Module]) -> Iterator[tuple[str, Tensor]]:
    """Every full HF tensor, on this rank's device, in the order of the forward pass.

    Collective over the tensor, pipeline and expert ranks: all of them iterate to the end and get
    the same tensors. One parameter's tensors exist at a time and may share memory with the weights:
    copy what is kept. A matrix with factors (lora.py) is merged with them.
    """
    models = [unwrap(chunk) for chunk in chunks]
    architecture = architecture_of(chunks)
    local = {entry.hf_names: weight for _, weight, entry in described_parameters(chunks)}
    factors = {each.entry.hf_names: each for each in factors_of(chunks)}

    def whole(entry: Parameter) -> tuple[Tensor, ...]:
        own = factors.get(tensors.of_factors(entry, architecture).hf_names)
        weight = local[entry.hf_names].detach()
        merged = weight if own is None or not own.is_on else own.added_to(weight)
        shards = shards_of(merged, models[0].pg_collection.tp) if entry.is_cut else [merged]
        return unshard(shards, entry, architecture)

    exchange = Exchange(chunks, list(local))
    for entry in tensors.canonical_parameters(architecture):
        shapes = [tensors.hf_shape(name, architecture) for name in entry.hf_names]
        found = exchange.everywhere(entry, partial(whole, entry), shapes)
        yield from zip(entry.hf_names, found, strict=True)


@torch.no_grad()
def copy_weights(
    from_chunks: Sequence[Module], to_chunks: Sequence[Module], decay: float = 0.0
) -> None:
    """to <- decay · to + (1 - decay) · from, on this rank; both share architecture and layout."""
    assert architecture_of(from_chunks) == architecture_of(to_chunks)
    for source, target in zip(
        described_parameters(from_chunks), described_parameters(to_chunks), strict=True
    ):
        if not decay:
            target[1].copy_(source[1])
            continue
        assert target[1].dtype == torch.float32, "in bf16 a small change is rounded away"
        target[1].lerp_(source[1].to(torch.float32), 1 - decay)


def refuse_non_finite(
    chunks: Sequence[Module],
    origin: str,
    remedy: str = "take finite weights, such as those of an earlier checkpoint",
) -> None:
    """Raise a NotFiniteError on all ranks if some weight is NaN or infinite. Collective."""
    parameters = [(weight.detach(), entry) for _, weight, entry in described_parameters(chunks)]
    for factors in factors_of(chunks):
        parameters += [(factor.detach(), factors.entry) for factor in factors.parameters()]
    bounds = torch.stack([_bounds(weight) for weight, _ in parameters])  # read from the GPU once
    finite = bounds.isfinite().all(dim=1).tolist()
    bad = None if all(finite) else ", ".join(parameters[finite.index(False)][1].hf_names)
    for name in gather_objects(bad):
        if name is not None:
            raise NotFiniteError(f"{origin}: tensor {name} holds NaN or infinity; {remedy}")


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass without a copy."""
    return bool(_bounds(tensor).isfinite().all())


def _bounds(tensor: Tensor) -> Tensor:
    """fp32 [2]: the least and the largest value, NaN if one is NaN; zeros for an empty tensor."""
    return torch.stack(tensor.aminmax()).float() if tensor.numel() else tensor.new_zeros(2).float()


def architecture_of(chunks: Sequence[Module]) -> Architecture:
    """The architecture that the chunks were built from."""
    return unwrap(chunks[0]).architecture


def described_parameters(chunks: Sequence[Module]) -> Iterator[tuple[str, Tensor, Parameter]]:
    """Name, weight and table entry of this rank's parameters; a tied head's copy comes last.

    The low-rank factors of frozen matrices are left out.
    """
    for model in map(unwrap, chunks):
        layers: Any = model.decoder.layers
        numbers = [layer.layer_number - 1 for layer in layers]
        architecture, ranks = model.architecture, model.pg_collection.ep
        num_experts = architecture.experts.number if architecture.experts else 0
        first_expert = ranks.rank() * (num_experts // ranks.size())
        for name, weight in model.named_parameters():
            if name.startswith("factors."):
                continue
            entry = tensors.describe(name, numbers, architecture, first_expert)
            yield name, weight, entry


def fill_weights(
    chunks: Sequence[Module],
    source: Callable[[str, tuple[slice, ...]], Tensor],
    only: Iterable[Tensor] | None = None,
) -> None:
    """Fill this rank's weights, or `only` these of them, from `source`: an HF tensor's name and
    part -> its values."""
    group = unwrap(chunks[0]).pg_collection.tp
    architecture = architecture_of(chunks)
    rank, size = group.rank(), group.size()
    wanted = None if only is None else set(map(id, only))
    for _, weight, entry in described_parameters(chunks):
        if wanted is not None and id(weight) not in wanted:
            continue
        parts = [source(name, part) for name, part in own_parts(entry, architecture, rank, size)]
        weight.copy_(join_parts(parts, entry.layout, architecture, size))


def weights_hash(chunks: Sequence[Module]) -> str:
    """SHA-256 over names, dtypes and values of all HF tensors, in hexadecimal; collective.

    The hash of the same weights is the same in any layout, and differs in another precision.
    """
    digest = hashlib.sha256()
    for name, tensor in iter_hf_tensors(chunks):
        if dist.get_rank() == 0:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return broadcast_object(digest.hexdigest())


class Exchange:
    """Gives all tensor, pipeline and expert ranks the tensors that some of them hold.

    Args:
        held: the HF names of each of this rank's table entries.
    """

    def __init__(self, chunks: Sequence[Module], held: list[tuple[str, ...]]) -> None:
        model = unwrap(chunks[0])
        self._groups, self._dtype = model.pg_collection, model.config.params_dtype
        self._device = next(model.parameters()).device
        self._expert_ranks = _expert_ranks(held, self._groups.ep)
        self._stages = _owners(list(self._expert_ranks), self._groups.pp)

    def knows(self, entry: Parameter) -> bool:
        """Whether some rank holds the entry."""
        return entry.hf_names in self._stages

    @torch.no_grad()
    def everywhere(
        self,
        entry: Parameter,
        whole: Callable[[], Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
    ) -> Iterator[Tensor]:
        """The entry's HF tensors, which have these shapes. `whole` is called only on the ranks that
        hold the entry, and joins their parts. Collective."""
        groups, stage = self._groups, self._stages[entry.hf_names]
        expert_rank = self._expert_ranks.get(entry.hf_names) if entry.is_expert else None
        if groups.pp.rank() == stage and expert_rank in (None, groups.ep.rank()):
            full = whole()
        else:
            dtype = torch.float32 if entry.fp32 else self._dtype
            like = {"dtype": dtype, "device": self._device}
            full = [torch.empty(shape, **like) for shape in shapes]
        for tensor in full:
            tensor = tensor.contiguous()
            if expert_rank is not None and groups.ep.size() > 1:
                dist.broadcast(tensor, group=groups.ep, group_src=expert_rank)
            if groups.pp.size() > 1:
                dist.broadcast(tensor, group=groups.pp, group_src=stage)
            yield tensor


def _expert_ranks(
    local: list[tuple[str, ...]], group: dist.ProcessGroup
) -> dict[tuple[str, ...], int]:
    """An expert rank that holds each parameter of a stage; only one holds an expert's."""
    held = gather_objects(local, group)
    return {names: rank for rank, names_held in enumerate(held) for names in names_held}


def _owners(local: list[tuple[str, ...]], group: dist.ProcessGroup) -> dict[tuple[str, ...], int]:
    """The first pipeline rank that holds each parameter."""
    held = list(enumerate(gather_objects(local, group)))
    return {names: rank for rank, names_held in reversed(held) for names in names_held}


def shards_of(weight: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The parts of all ranks of the group. Collective."""
    if group.size() == 1:
        return [weight]
    shards = [torch.empty_like(weight) for _ in range(group.size())]
    dist.all_gather(shards, weight.contiguous(), group=group)
    return shards
