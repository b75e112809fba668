"""An adapter that PEFT has saved, into a model: as the factors to train on, or merged.

Training starts from an adapter that has one rank and scale, a pair of factors for each matrix that
student.lora trains, and nothing else. Any other is merged first. How the files are read is in
peft_adapter.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.adapted import adapted_shapes, matrices_of
from stable_opd_mcore.models.files.megatron_checkpoint import is_megatron
from stable_opd_mcore.models.files.peft_adapter import AdapterPair, PeftAdapter, short_name
from stable_opd_mcore.models.files.peft_directory import trained_positions
from stable_opd_mcore.models.files.peft_settings import CONFIG, WEIGHTS
from stable_opd_mcore.models.files.safetensors_files import Change, TensorFiles
from stable_opd_mcore.models.files.small_files import TRAINED
from stable_opd_mcore.models.hidden_states import unwrap
from stable_opd_mcore.models.layers.factors import Which
from stable_opd_mcore.models.lora import fill_factors
from stable_opd_mcore.models.tensor_cuts import join_parts, own_parts
from stable_opd_mcore.models.tensors import canonical_parameters
from stable_opd_mcore.models.weights import (
    architecture_of,
    described_parameters,
    iter_hf_tensors,
    refuse_non_finite,
)


def adapter_form(directory: Path, architecture: Architecture, name: str) -> LoraConfig:
    """The settings of student.lora that would train such an adapter, for a teacher that is one.

    Args:
        name: its key in teacher.models, for errors.

    Raises:
        UserError: as `PeftAdapter`; or no such settings: then it must be merged first.
    """
    _require_theta(directory, architecture, "teacher")
    with PeftAdapter(directory, architecture, base="teacher.path") as adapter:
        every = ((each, _pair_of(adapter, each)) for each in adapted_shapes(architecture))
        found = {each: pair for each, pair in every if pair is not None}
        used = {short_name(half) for each in found for half in _halves(each)}
        others = [*adapter.other_changes(), *sorted(adapter.pairs.keys() - used)]
    forms = {(".experts." in each, pair.rank, pair.scale) for each, pair in found.items()}
    ranks = {is_expert: rank for is_expert, rank, _ in forms}
    scales = {scale for *_, scale in forms}
    matrices = matrices_of(found, architecture) if found else None
    if others or matrices is None or len(ranks) != len(forms) or len(scales) != 1:
        said = f"{others[0]} is no factor" if others else "its matrices, ranks or scales vary"
        raise UserError(
            f"{adapter.file}: {said}; a teacher that is an adapter has one pair of factors for "
            "each chosen matrix of all layers, of one rank and scale: run `stable-opd convert "
            f"{directory} MERGED`, and set teacher.models.{name}.path=MERGED in place of adapter"
        )
    rank = ranks.get(False, ranks.get(True, 1))
    return LoraConfig(
        rank=rank,
        alpha=scales.pop() * rank,
        expert_rank=ranks.get(True),
        matrices=tuple(matrices),
    )


def check_adapter(directory: Path, architecture: Architecture, lora: LoraConfig) -> None:
    """Check that training can start from an adapter: it has a pair of factors for each chosen
    matrix, of the rank and scale of `lora`, and nothing else.

    Raises:
        UserError: as `PeftAdapter`, or what `lora` should be, or that the adapter must be merged
            first.
    """
    _require_theta(directory, architecture, "student")
    with PeftAdapter(directory, architecture, base="student.path") as adapter:
        if other := adapter.other_changes():
            raise UserError(
                f"{adapter.file}: {other[0]} is no factor of a matrix of the layers, which are all "
                f"that student.lora trains; {_merge_first(directory)}"
            )
        _require_matrices(adapter, directory, architecture, lora)
        _require_form(adapter, directory, architecture, lora)


def _require_theta(directory: Path, architecture: Architecture, role: str) -> None:
    theta = trained_positions(directory).get("rope_theta", architecture.rotary.theta)
    if theta != architecture.rotary.theta:
        raise UserError(
            f"{directory / TRAINED}: the adapter was trained with rope_theta={theta!r}, the "
            f"{role} has {architecture.rotary.theta:g}; set {role}.rope_theta={theta!r}"
        )


def _merge_first(directory: Path) -> str:
    return f"run `stable-opd convert {directory} MERGED`, and set student.path=MERGED without it"


def _halves(name: str) -> list[str]:
    """The HF tensors of the matrix with this name: gate and up where files interleave these."""
    if not name.endswith(".gate_up_proj.weight"):
        return [name]
    return [name.replace("gate_up_proj", kind) for kind in ("gate_proj", "up_proj")]


def _pair_of(adapter: PeftAdapter, name: str) -> AdapterPair | None:
    """The pair of a matrix; None: it has none, or not one."""
    pairs = [adapter.pairs.get(short_name(each)) for each in _halves(name)]
    return pairs[0] if len({pair and pair.a for pair in pairs}) == 1 else None


def _require_matrices(
    adapter: PeftAdapter, directory: Path, architecture: Architecture, lora: LoraConfig
) -> None:
    """Raise a UserError if the adapter has pairs for other matrices than `lora` chooses."""
    wanted = adapted_shapes(architecture, lora.matrices)
    every = adapted_shapes(architecture)
    found = [name for name in every if _pair_of(adapter, name) is not None]
    used = {short_name(each) for name in found for each in _halves(name)}
    others = adapter.pairs.keys() - used
    if set(found) == set(wanted) and not others:
        return
    settings = None if others else matrices_of(found, architecture)
    if settings is None:
        remedy = _merge_first(directory)
    else:
        text = "null" if len(found) == len(every) else f"[{','.join(settings)}]"
        remedy = f"set student.lora.matrices={text}"
    differ = sorted({*map(short_name, wanted)} ^ {*map(short_name, found)} | others)
    raise UserError(
        f"{adapter.file}: it has factors for {len(found)} matrices, student.lora.matrices="
        f"{list(lora.matrices) if lora.matrices else 'null'} asks for {len(wanted)}, and they "
        f"differ in {differ[0]}; {remedy}"
    )


def _require_form(
    adapter: PeftAdapter, directory: Path, architecture: Architecture, lora: LoraConfig
) -> None:
    """Raise a UserError if the adapter's ranks or scales are not those of `lora`."""
    forms: dict[bool, set[tuple[int, float]]] = {}  # of experts -> rank and scale
    for name in adapted_shapes(architecture, lora.matrices):
        pair = _pair_of(adapter, name)
        assert pair is not None
        forms.setdefault(".experts." in name, set()).add((pair.rank, pair.scale))
    for is_expert, each in sorted(forms.items()):
        if len(each) > 1:
            raise UserError(
                f"{directory / CONFIG}: its factors have the ranks and scales {sorted(each)}, "
                f"those of student.lora have one; {_merge_first(directory)}"
            )
        ((rank, scale),) = each
        alpha = scale * (math.sqrt(rank) if lora.rslora else rank)
        for key, own, found in (
            ("expert_rank" if is_expert else "rank", lora.rank_of(is_expert), rank),
            ("alpha", lora.alpha, alpha),
        ):
            if not math.isclose(own, found, rel_tol=1e-6):
                raise UserError(
                    f"student.lora.{key}={own:g}, but the adapter in {directory} has {found:g}; "
                    f"set student.lora.{key}={found:g}"
                )


def merged_carried(directory: Path, base: Path, architecture: Architecture) -> Change | None:
    """What an adapter makes of tensors of other parts of the model, which are copied from `base`;
    None: it changes none.

    Raises:
        UserError: as `PeftAdapter`, or it changes one that `base` lacks.
    """
    if not architecture.family.carried or is_megatron(base):
        return None
    with PeftAdapter(directory, architecture) as adapter, TensorFiles(base, architecture) as files:
        changes = adapter.changes_carried(files.carried())

    def change(name: str, tensor: Tensor) -> Tensor:
        with PeftAdapter(directory, architecture) as again:
            return again.merged(name, tensor)

    return change if changes else None


def factor_dtypes(directory: Path) -> set[str]:
    """The types of an adapter's tensors, by safetensors' names; none where `check_adapter` says
    that they cannot be read."""
    try:
        with safe_open(directory / WEIGHTS, framework="pt") as tensors:
            names: list[str] = tensors.keys()
            return {tensors.get_slice(name).get_dtype() for name in names}
    except (OSError, SafetensorError):
        return set()


def load_adapter(chunks: Sequence[Module], directory: Path, lora: LoraConfig) -> None:
    """Fill this rank's factors from a PEFT directory. Collective.

    Raises:
        UserError: as `check_adapter`, or a value is not finite.
    """
    check_adapter(directory, architecture_of(chunks), lora)
    load_factors(chunks, directory)


def load_factors(chunks: Sequence[Module], directory: Path) -> None:
    """The same where the adapter is checked."""
    architecture = architecture_of(chunks)
    with PeftAdapter(directory, architecture) as adapter:

        def factor(name: str, which: Which, _: tuple[int, int]) -> Tensor:
            halves = [adapter.factors(short_name(each)) for each in _halves(name)]
            return halves[0][0] if which == "A" else torch.cat([b for _, b in halves])

        fill_factors(chunks, factor)
    refuse_non_finite(chunks, str(directory / WEIGHTS))


@torch.no_grad()
def merge_adapter(chunks: Sequence[Module], directory: Path) -> None:
    """Merge an adapter of any form with the weights of its base. Collective.

    Raises:
        UserError: as `PeftAdapter`, or a value is not finite.
    """
    architecture, group = architecture_of(chunks), unwrap(chunks[0]).pg_collection.tp
    held = {entry.hf_names: weight for _, weight, entry in described_parameters(chunks)}
    whole = iter_hf_tensors(chunks)
    with PeftAdapter(directory, architecture) as adapter:
        for entry in canonical_parameters(architecture):
            full = dict(next(whole) for _ in entry.hf_names)
            if not any(map(adapter.changes, full)):
                continue
            full = {name: adapter.merged(name, tensor) for name, tensor in full.items()}
            if (weight := held.get(entry.hf_names)) is not None:
                cut = own_parts(entry, architecture, group.rank(), group.size())
                parts = [full[name][part] for name, part in cut]
                weight.copy_(join_parts(parts, entry.layout, architecture, group.size()))
    refuse_non_finite(chunks, str(directory / WEIGHTS))
