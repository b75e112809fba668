"""Low-rank factors in PEFT's form: adapter_config.json and adapter_model.safetensors.

PEFT loads what is written here. How such files are read is in peft_adapter.py and peft_loading.py.
A model with other parts may have two classes, whose names differ: the adapter fits the whole, which
it names, and its folder `causal_lm` what AutoModelForCausalLM gives.

Letters: I inputs and O outputs of a matrix, R rank of its factors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import atomic_directory, describe_space
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.adapted import adapted_shapes, last_name
from stable_opd_mcore.models.files.peft_settings import CONFIG, MERGED_SETTINGS, WEIGHTS
from stable_opd_mcore.models.files.safetensors_files import INDEX, SINGLE
from stable_opd_mcore.models.files.small_files import TRAINED
from stable_opd_mcore.models.layers.factors import Which
from stable_opd_mcore.models.lora import config_of, iter_factors
from stable_opd_mcore.models.weights import architecture_of, refuse_non_finite

CAUSAL_LM = "causal_lm"  # the adapter for the class that AutoModelForCausalLM gives
_PREFIX = "base_model.model."
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.\w+\.weight")
# Settings that do not change the product of the factors, or that names and shapes of tensors show
_WITHOUT_EFFECT = {
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters",
    "exclude_modules", "layers_to_transform", "layers_pattern", "task_type",
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "velora_config", "use_rslora", "use_dora",
    "bias", "lora_bias", "modules_to_save", "trainable_token_indices", "fan_in_fan_out",
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
    lora, architecture = config_of(chunks), architecture_of(chunks)
    stacks = _expert_stacks(architecture, lora) if architecture.family.stacked_experts else set()
    parts: dict[str, list[Tensor]] = {}  # of all experts, or the only one
    for file_name, a_RI, b_OR in iter_factors(chunks):
        name = architecture.family.in_module(file_name)
        if dist.get_rank() == 0:
            padded_a_RI, padded_b_OR = _padded(a_RI, b_OR, lora)
            if _holds_gate_up(name):
                padded_b_OR = _interleaved(padded_b_OR)
            parts.setdefault(_place(name, "A", stacks), []).append(padded_a_RI)
            parts.setdefault(_place(name, "B", stacks), []).append(padded_b_OR)
    kept = {
        name: torch.cat(each) if ".lora_A." in name else torch.stack(each, dim=2).flatten(1)
        for name, each in parts.items()
    }
    if dist.get_rank() == 0:
        try:
            with atomic_directory(directory) as partial:
                settings = adapter_config(kept, lora, base, architecture)
                if architecture.family.has_causal_class:
                    inner = {name.replace(".language_model", "", 1): kept[name] for name in kept}
                    (partial / CAUSAL_LM).mkdir()
                    _write(inner, settings, partial / CAUSAL_LM)
                if architecture.family.full_class is not None:
                    settings |= {"task_type": None, "auto_mapping": _mapping(architecture)}
                _write(kept, settings, partial)
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


def _mapping(architecture: Architecture) -> dict[str, str | None]:
    """PEFT's name of the class with which the adapter's names agree."""
    kind, name = architecture.model_type, architecture.family.full_class
    library = f"transformers.models.{kind}.modeling_{kind}"
    return {"base_model_class": name, "parent_library": library}


def _write(kept: Mapping[str, Tensor], settings: Mapping[str, Any], directory: Path) -> None:
    save_tensors(dict(kept), directory / WEIGHTS)
    text = json.dumps(settings, indent=2) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")


def _padded(a_RI: Tensor, b_OR: Tensor, lora: LoraConfig) -> tuple[Tensor, Tensor]:
    """A pair on the CPU with the file's only rank. A smaller one is padded with zeros, and its B is
    multiplied, because PEFT has one scale for all."""
    own_rank, rank = a_RI.shape[0], max(lora.rank, lora.rank_of(True))
    padded_a_RI = a_RI.new_zeros(rank, a_RI.shape[1], device="cpu")
    padded_a_RI[:own_rank] = a_RI
    padded_b_OR = b_OR.new_zeros(b_OR.shape[0], rank, device="cpu")
    share = lora.scale(own_rank) / lora.scale(rank)
    padded_b_OR[:, :own_rank] = b_OR if own_rank == rank else b_OR * share
    return padded_a_RI, padded_b_OR


def _place(name: str, which: Which, stacks: set[str]) -> str:
    """PEFT's name of the tensor that holds a factor, or those of all experts.

    Args:
        stacks: with factors; empty where files have a tensor for each expert.
    """
    match = _EXPERT.fullmatch(name) if stacks else None
    if match is None:
        return tensor_name(name, which)
    # PEFT wraps both stacks: the inner wrapper, base_layer, has the factors of gate and up.
    is_inner = _holds_gate_up(name) and len(stacks) > 1
    return tensor_name(match[1] + (".base_layer" if is_inner else ""), which)


def _holds_gate_up(name: str) -> bool:
    """Whether the HF name is of one matrix of gate and up, whose rows files interleave."""
    return name.endswith(".gate_up_proj.weight")


def _interleaved(b_OR: Tensor) -> Tensor:
    """Gate's rows, then up's, to alternating ones."""
    return b_OR.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def adapter_config(
    kept: Mapping[str, Tensor], lora: LoraConfig, base: str | None, architecture: Architecture
) -> dict[str, Any]:
    """The fields of adapter_config.json for the tensors `kept`, as PEFT writes them."""
    matrices = {name.removeprefix(_PREFIX).split(".lora_")[0] for name in kept}
    rank = max(lora.rank, lora.rank_of(True))
    alpha = lora.scale(rank) * rank  # SGLang and llama.cpp ignore use_rslora
    of_parameters: dict[str, Any] = {}
    if architecture.family.shared_expert or architecture.family.stacked_experts:
        # Named as modules, PEFT would find either the experts or shared experts and dense layers.
        of_experts = {name for name in matrices if ".experts" in name}
        others = {name for name in matrices - of_experts if ".mlp." in name}
        matrices -= of_experts | others
        parameters = {".".join([*name.split(".")[-2:], "weight"]) for name in others}
        parameters |= {f"mlp.experts.{kind}" for kind in _expert_stacks(architecture, lora)}
        of_parameters = {"target_parameters": sorted(parameters)} if parameters else {}
        if _GATE_UP in parameters and not architecture.family.stacked_experts:
            of_parameters |= _patterns(rank, alpha)
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


def _expert_stacks(architecture: Architecture, lora: LoraConfig) -> set[str]:
    """The stacks of experts' matrices, as transformers 5 holds them, that have factors."""
    names = [name for name in adapted_shapes(architecture, lora.matrices) if ".experts." in name]
    kinds = {last_name(name) for name in names}
    return {"down_proj" if kind == "down_proj" else "gate_up_proj" for kind in kinds}


def _patterns(rank: int, alpha: float) -> dict[str, dict[str, float]]:
    """PEFT's settings of the experts' gate and up, which it joins with the ranks of both."""
    return {"rank_pattern": {_GATE_UP: 2 * rank}, "alpha_pattern": {_GATE_UP: 2 * alpha}}


def is_adapter(directory: Path) -> bool:
    """Whether the directory holds an adapter without the weights of a model. Some programs save the
    model's config.json next to an adapter."""
    has_model = any((directory / name).is_file() for name in (SINGLE, INDEX))
    return (directory / CONFIG).is_file() and not has_model


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
    return {"path": base, "window": None, "rope_theta": None, **trained_positions(directory)}


def named_base(directory: Path) -> str | None:
    """The path or hub id of the model that an adapter was trained on; None if it names none."""
    base = read_json_object(directory / CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def mark_positions(architecture: Architecture) -> dict[str, Any]:
    """What an adapter's `trained.json` says of its model, since config.json may say otherwise."""
    return {"window": architecture.max_positions, "rope_theta": architecture.rotary.theta}


def trained_positions(directory: Path) -> dict[str, Any]:
    file = directory / TRAINED
    record = read_json_object(file) if file.is_file() else {}
    found = {key: record[key] for key in ("window", "rope_theta") if key in record}
    if any(type(value) not in (int, float) for value in found.values()):
        raise UserError(f"{file}: {found} should be numbers; restore the file")
    return found


def unread_settings(directory: Path) -> dict[str, Any]:
    """Keys of adapter_config.json that switch something on which is not known here."""
    fields = read_json_object(directory / CONFIG)
    known = MERGED_SETTINGS.keys() | _WITHOUT_EFFECT
    return {key: value for key, value in sorted(fields.items()) if value and key not in known}
