"""Low-rank factors in PEFT's form: adapter_config.json and adapter_model.safetensors.

PEFT loads what is written here. An adapter that is read must have one rank and alpha for all
matrices, and a pair for each matrix that has factors in models/lora.py; variants of LoRA are
refused.

Where files stack the experts of a layer, as gpt-oss's do, PEFT stacks their pairs, too. A is
[E R, I]: all rows of the first expert, then those of the next. B is [O, R E]: the first column of
every expert, then the second. In the B of gate and up their rows alternate, as in the files.

Letters: E experts, I inputs and O outputs of a matrix, R rank of its factors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import atomic_directory, describe_space
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.small_files import TRAINED
from stable_opd_mcore.models.layers.factors import Which
from stable_opd_mcore.models.lora import (
    adapt,
    adapted_shapes,
    fill_factors,
    form_of,
    iter_factors,
    merge,
)
from stable_opd_mcore.models.weights import architecture_of, refuse_non_finite

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.\w+\.weight")
# Settings with which PEFT makes another model of the same factors -> the values that are accepted
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "megatron_config": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base
}
# Settings that do not change the product of the factors, or that names and shapes of tensors show
_WITHOUT_EFFECT = {
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters",
    "exclude_modules", "layers_to_transform", "layers_pattern", "task_type",
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip


def export_adapter(
    chunks: Sequence[Module],
    directory: Path,
    base: str | None,
    describe: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write the factors of all ranks. Collective; rank 0 writes.

    Args:
        base: the directory of the frozen weights; None: they were random.
        describe: writes other files into the directory, on rank 0.

    Raises:
        UserError: a factor is not finite, or the directory cannot be written.
    """
    refuse_non_finite(chunks, f"{directory} is not written")
    form = form_of(chunks)
    rank = int(max(form["rank"], form.get("expert_rank", 0)))
    architecture = architecture_of(chunks)
    parts: dict[str, list[Tensor]] = {}  # of all experts, or the only one
    for name, a_RI, b_OR in iter_factors(chunks):
        if dist.get_rank() == 0:
            own_rank = a_RI.shape[0]
            # The file has one rank for all pairs. A smaller pair is padded with zeros, and its B is
            # multiplied, because PEFT divides alpha by the file's rank.
            padded_a_RI = a_RI.new_zeros(rank, a_RI.shape[1], device="cpu")
            padded_a_RI[:own_rank] = a_RI
            padded_b_OR = b_OR.new_zeros(b_OR.shape[0], rank, device="cpu")
            padded_b_OR[:, :own_rank] = b_OR if own_rank == rank else b_OR * (rank / own_rank)
            if _holds_gate_up(name):
                padded_b_OR = _swapped(padded_b_OR, (2, -1))
            parts.setdefault(_place(name, "A", architecture)[0], []).append(padded_a_RI)
            parts.setdefault(_place(name, "B", architecture)[0], []).append(padded_b_OR)
    kept = {
        name: torch.cat(each) if ".lora_A." in name else torch.stack(each, dim=2).flatten(1)
        for name, each in parts.items()
    }
    if dist.get_rank() == 0:
        try:
            with atomic_directory(directory) as partial:
                save_tensors(kept, partial / WEIGHTS)
                text = json.dumps(adapter_config(kept, rank, form["alpha"], base), indent=2) + "\n"
                (partial / CONFIG).write_text(text, encoding="utf-8")
                describe(partial)
        except (OSError, SafetensorError) as error:
            space = describe_space(directory, sum(tensor.nbytes for tensor in kept.values()))
            raise UserError(
                f"{directory}: cannot be written: {error}; {space}; make room there"
            ) from error
    dist.barrier()


def tensor_name(name: str, which: Which) -> str:
    """PEFT's name of a factor of the matrix with this HF name."""
    return f"{_PREFIX}{name.removesuffix('.weight')}.lora_{which}.weight"


def _place(name: str, which: Which, architecture: Architecture) -> tuple[str, int | None]:
    """PEFT's name of the tensor that holds a factor, and the expert whose part of it the factor is;
    None: the factor is the whole tensor."""
    match = _EXPERT.fullmatch(name) if architecture.family.stacked_experts else None
    if match is None:
        return tensor_name(name, which), None
    # PEFT wraps the experts twice: the inner wrapper, base_layer, has the factors of gate and up.
    wrapped = match[1] + (".base_layer" if _holds_gate_up(name) else "")
    return tensor_name(wrapped, which), int(match[2])


def _holds_gate_up(name: str) -> bool:
    """Whether the HF name is of one matrix of gate and up, whose rows files interleave."""
    return name.endswith(".gate_up_proj.weight")


def _swapped(b_OR: Tensor, order: tuple[int, int]) -> Tensor:
    """Reorder rows of gate and up. (2, -1): gate's, then up's, to alternating; (-1, 2): back."""
    return b_OR.unflatten(0, order).transpose(0, 1).flatten(0, 1)


def adapter_config(
    kept: Mapping[str, Tensor], rank: int, alpha: float, base: str | None
) -> dict[str, Any]:
    """The fields of adapter_config.json for the tensors `kept`, as PEFT writes them."""
    matrices = {name.removeprefix(_PREFIX).split(".lora_")[0] for name in kept}
    shared = {name for name in matrices if ".shared_expert." in name}
    stacked = {name for name in matrices if name.endswith((".experts", ".experts.base_layer"))}
    of_parameters: dict[str, Any] = {}
    if stacked:
        matrices -= stacked
        of_parameters = {"target_parameters": [_DOWN, _GATE_UP]}
    if shared:  # named as modules, PEFT would find either the experts or the shared expert
        parameters = {f"shared_expert.{name.rpartition('.')[2]}.weight" for name in shared}
        parameters |= {_GATE_UP, _DOWN}
        of_parameters = {"target_parameters": sorted(parameters), **_patterns(rank, alpha)}
        matrices = {name for name in matrices - shared if ".experts." not in name}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in matrices}),
        **of_parameters,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def _patterns(rank: int, alpha: float) -> dict[str, dict[str, float]]:
    """PEFT's settings of the experts' gate and up, which it joins with the ranks of both."""
    return {"rank_pattern": {_GATE_UP: 2 * rank}, "alpha_pattern": {_GATE_UP: 2 * alpha}}


def is_adapter(directory: Path) -> bool:
    """Whether the directory holds an adapter without a model."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


def base_of(directory: Path) -> dict[str, Any]:
    """The model that the adapter belongs to, as settings of a student: `path`, and the `window` and
    `rope_theta` with which a run of ours trained it.

    Raises:
        UserError: its configuration names no directory that exists.
    """
    base = named_base(directory)
    if base is None or not (Path(base) / "config.json").is_file():
        raise UserError(
            f"{directory / CONFIG}: base_model_name_or_path={base!r} is not a model directory "
            "here; set it to that of the model on which the adapter was trained"
        )
    return {"path": base, "window": None, "rope_theta": None, **_trained_positions(directory)}


def named_base(directory: Path) -> str | None:
    """The path or hub id of the model that an adapter was trained on; None if it names none."""
    base = read_json_object(directory / CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def mark_positions(architecture: Architecture) -> dict[str, Any]:
    """What an adapter's `trained.json` says of its model, since config.json may say otherwise."""
    return {"window": architecture.max_positions, "rope_theta": architecture.rotary.theta}


def _trained_positions(directory: Path) -> dict[str, Any]:
    file = directory / TRAINED
    record = read_json_object(file) if file.is_file() else {}
    found = {key: record[key] for key in ("window", "rope_theta") if key in record}
    if any(type(value) not in (int, float) for value in found.values()):
        raise UserError(f"{file}: {found} should be numbers; restore the file")
    return found


def read_config(directory: Path) -> tuple[int, float]:
    """Rank and alpha of a PEFT directory.

    Raises:
        UserError: no such file, or a variant of LoRA that is not read.
    """
    file = directory / CONFIG
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a directory that PEFT has saved")
    fields = read_json_object(file)
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or min(rank, alpha) <= 0:
        raise UserError(f"{file}: r={rank!r} and lora_alpha={alpha!r} should be positive numbers")
    patterns = {key: ({}, None, pattern) for key, pattern in _patterns(rank, alpha).items()}
    for key, values in (_PLAIN | patterns).items():
        if key in fields and fields[key] not in values:
            raise UserError(
                f"{file}: {key}={fields[key]!r} is not supported; expected {values[0]!r}: give the "
                "model into which PEFT has merged this adapter as student.path, or another adapter"
            )
    return rank, float(alpha)


def unread_settings(directory: Path) -> dict[str, Any]:
    """Keys of adapter_config.json that switch something on which is not known here."""
    fields = read_json_object(directory / CONFIG)
    known = _PLAIN.keys() | _WITHOUT_EFFECT
    return {key: value for key, value in sorted(fields.items()) if value and key not in known}


def check_adapter(
    directory: Path, architecture: Architecture, lora: LoraConfig
) -> dict[str, tuple[int, ...]]:
    """Check the settings, and the names and shapes of all tensors, which are returned.

    Raises:
        UserError: as `read_config`; another rank or alpha than `lora` has; a tensor is missing,
            misshapen or without a place.
    """
    rank, alpha = read_config(directory)
    file = directory / WEIGHTS
    own = {"rank": lora.rank, "alpha": lora.alpha, "expert_rank": lora.expert_rank or rank}
    for key, found in (("rank", rank), ("alpha", alpha), ("expert_rank", rank)):
        if own[key] != found:
            raise UserError(
                f"student.lora.{key}={own[key]:g}, but the adapter in {directory} has {found:g}; "
                f"set student.lora.{key}={found:g}"
            )
    theta = _trained_positions(directory).get("rope_theta", architecture.rotary.theta)
    if theta != architecture.rotary.theta:
        raise UserError(
            f"{directory / TRAINED}: the adapter was trained with rope_theta={theta!r}, the "
            f"student has {architecture.rotary.theta:g}; set student.rope_theta={theta!r}"
        )
    wanted: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs) in adapted_shapes(architecture).items():
        for which in get_args(Which):
            tensor, expert = _place(name, which, architecture)
            ranks = rank * (1 if expert is None else _num_experts(architecture))
            wanted[tensor] = (ranks, inputs) if which == "A" else (outputs, ranks)
    try:
        with safe_open(file, framework="pt") as tensors:
            names: list[str] = tensors.keys()
            found = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        remedy = "copy or download it again"
        if not file.exists() and file.with_suffix(".bin").exists():
            remedy = "a pickle (.bin) is not read: load the adapter with PEFT and save it again"
        raise UserError(f"{file}: not readable: {error}; {remedy}") from error
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"{file}: tensor {name} has shape {found.get(name, 'absent')}, expected "
                f"{wanted.get(name, 'absent')}; give an adapter of all matrices of this model's "
                "layers and no others, with a pair for each of an expert's"
            )
    return found


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
    architecture = architecture_of(chunks)
    check_adapter(directory, architecture, lora)
    with safe_open(directory / WEIGHTS, framework="pt") as tensors:
        read = lru_cache(maxsize=4)(tensors.get_tensor)  # a layer's stacks, read by many experts

        def factor(name: str, which: Which, _: tuple[int, int]) -> Tensor:
            tensor, expert = _place(name, which, architecture)
            whole = read(tensor)
            if expert is None:
                return whole
            if which == "A":
                return whole.chunk(_num_experts(architecture))[expert]
            b_OR = whole.unflatten(1, (-1, _num_experts(architecture)))[..., expert]
            return _swapped(b_OR, (-1, 2)) if _holds_gate_up(name) else b_OR

        fill_factors(chunks, factor)
    refuse_non_finite(chunks, str(directory / WEIGHTS))


def _num_experts(architecture: Architecture) -> int:
    assert architecture.experts is not None
    return architecture.experts.number


def merge_adapter(chunks: Sequence[Module], directory: Path) -> None:
    """Add a PEFT directory's factors to the weights of its base. Collective.

    Raises:
        UserError: as `read_config` and `load_adapter`.
    """
    rank, alpha = read_config(directory)
    adapt(chunks, rank=rank, alpha=alpha)
    load_adapter(chunks, directory, LoraConfig(rank=rank, alpha=alpha))
    merge(chunks)
