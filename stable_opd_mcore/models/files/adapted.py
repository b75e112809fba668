"""Which matrices of a model have low-rank factors. Loads without torch.

A matrix is chosen by the end of its Hugging Face name without numbers, as PEFT's target_modules
choose: `q_proj`, `self_attn.o_proj`, `experts.down_proj`, `shared_expert.down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import cast, get_args

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.description.architecture import Architecture

LAYOUTS = (
    *get_args(tensors.Grouped), "replicated", "rows", "columns", "gate_up", "expert_gate_up",
    "expert_down",
)  # fmt: skip
_NUMBER = re.compile(r"\.\d+(?=\.)")

Matrices = Collection[str] | None  # as in student.lora.matrices; None: all


def chosen(
    entry: tensors.Parameter, architecture: Architecture, matrices: Matrices
) -> tuple[str, ...]:
    """The HF names of the matrices of a parameter that have a pair of factors each."""
    if entry.layout not in LAYOUTS:
        return ()
    return tuple(
        name
        for name in tensors.of_factors(entry, architecture).hf_names
        if len(tensors.hf_shape(name, architecture)) == 2 and _is_chosen(name, matrices)
    )


def _is_chosen(name: str, matrices: Matrices) -> bool:
    return matrices is None or any(_kind(name).endswith(f".{end}") for end in matrices)


def _kind(name: str) -> str:
    """The name without the numbers of layer and expert."""
    return _NUMBER.sub("", name.removesuffix(".weight"))


def adapted_shapes(
    architecture: Architecture, matrices: Matrices = None
) -> dict[str, tuple[int, int]]:
    """HF name and shape [O, I] of every matrix that has factors.

    Raises:
        UserError: one of `matrices` is the name of none.
    """
    found = {
        name: cast(tuple[int, int], tensors.hf_shape(name, architecture))
        for entry in tensors.canonical_parameters(architecture)
        for name in chosen(entry, architecture, None)
    }
    for end in matrices or ():
        if not any(_is_chosen(name, [end]) for name in found):
            known = sorted({last_name(name) for name in found})
            raise UserError(
                f"student.lora.matrices: {end!r} names no matrix of this "
                f"{architecture.model_type} model; choose among {', '.join(known)}"
            )
    return {name: shape for name, shape in found.items() if _is_chosen(name, matrices)}


def missing_shapes(architecture: Architecture, matrices: Matrices) -> dict[str, tuple[int, int]]:
    """The matrices without factors that a server joins with chosen ones, such as k with q and v. It
    must be sent zeros for them: SGLang reads a joined matrix by its first part, and needs all."""
    wanted, every = adapted_shapes(architecture, matrices), adapted_shapes(architecture)
    joined = [entry.hf_names for entry in tensors.canonical_parameters(architecture)]
    names = [each for each in joined if not wanted.keys().isdisjoint(each)]
    return {name: every[name] for each in names for name in each if name not in wanted}


def sent_names(architecture: Architecture, matrices: Matrices) -> list[str]:
    """The names in their modules of the matrices whose factors a server gets."""
    sent = adapted_shapes(architecture, matrices) | missing_shapes(architecture, matrices)
    return sorted(set(map(last_name, sent)))


def last_name(name: str) -> str:
    """A matrix's name in its module: `q_proj`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def matrices_of(names: Collection[str], architecture: Architecture) -> list[str] | None:
    """The setting that chooses exactly these matrices; None: there is none."""
    every = adapted_shapes(architecture)
    kinds = {_kind(name) for name in names}
    if set(names) != {name for name in every if _kind(name) in kinds}:
        return None
    prefix = f"{architecture.family.prefix}layers."
    ends = {kind.removeprefix(prefix) for kind in kinds}
    others = {_kind(name) for name in every} - kinds
    is_short = {
        end: not any(kind.endswith("." + end.rpartition(".")[2]) for kind in others) for end in ends
    }
    return sorted({end.rpartition(".")[2] if is_short[end] else end for end in ends})
