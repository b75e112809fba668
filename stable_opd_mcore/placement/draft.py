"""The draft of speculative decoding: its directory, its size, and whether the student can have it.

Needs no torch. Not here: the servers' arguments (rollout/sglang/server_setup.py).
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from stable_opd_mcore.config.rollouts import SpeculativeConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.description.config_fields import read_fields
from stable_opd_mcore.placement.layout import Layout
from stable_opd_mcore.placement.model_size import ModelSize

_KEY = "rollout.sglang.speculative"
_OF_PARTS = ("model.visual.", "vision_tower.", "multi_modal_projector.")  # carried, but no draft
_WEIGHTS = (".safetensors", ".bin")
_INDEX = "model.safetensors.index.json"


def draft_of(config: Config) -> SpeculativeConfig | None:
    """The draft's settings, where servers sample."""
    return config.rollout.sglang.speculative if config.rollout.has_servers else None


def draft_directory(config: Config, settings: SpeculativeConfig) -> Path:
    """Where the draft's weights are. Raises UserError for a student without a directory."""
    place = settings.draft or config.student.path
    if place is None:
        raise UserError(
            f"{_KEY}.algorithm=mtp without {_KEY}.draft and student.path: the layer that predicts "
            "several tokens is in a model directory; name it as one of them"
        )
    return Path(place)


def draft_bytes(config: Config, student: Architecture, element: int) -> int:
    """The memory that a draft's weights need in addition to the student's, over a server's ranks.

    Args:
        element: bytes of a weight.
    """
    settings = draft_of(config)
    if settings is None:
        return 0
    if settings.algorithm == "mtp":  # one layer, and what joins embedding and hidden state for it
        size = ModelSize(student, Layout(1))
        ends = student.vocab_size * student.hidden_size * (1 if student.tied else 2)
        layer = (size.total_parameters() - ends) // student.num_layers
        return element * (layer + 2 * student.hidden_size**2)
    directory = draft_directory(config, settings)
    _require_eagle3(directory, student)
    return sum(each.stat().st_size for each in directory.iterdir() if each.suffix in _WEIGHTS)


def least_tokens(config: Config, student: Architecture, element: int) -> float | None:
    """Tokens of a pass of the student below which a draft costs more than it saves, at the least;
    None without one.

    A pass reads all weights, and so does the draft for each of its steps, with the student's head
    for a layer of multi-token prediction. Where the student's passes are bound by products and not
    by memory, a draft costs at more tokens, too.
    """
    settings = draft_of(config)
    if settings is None:
        return None
    head = student.vocab_size * student.hidden_size if settings.algorithm == "mtp" else 0
    read = draft_bytes(config, student, element) + element * head
    whole = element * ModelSize(student, Layout(1)).total_parameters()
    return 1 + settings.steps * read / whole


def refuse_unfit_draft(config: Config, student: Architecture, *, on_gpu: bool) -> None:
    """Raise a UserError for a draft that is not there or belongs to another student, and for
    servers on a CPU."""
    settings = draft_of(config)
    if settings is None:
        return
    if not on_gpu:
        raise UserError(
            f"{_KEY} on a CPU: SGLang takes the likeliest tokens there, whatever the temperature, "
            "and its attention in plain torch has no draft; set it to null"
        )
    directory = draft_directory(config, settings)
    if settings.algorithm == "eagle3":
        _require_eagle3(directory, student)
        return
    prefixes = tuple(each for each in student.carried if each not in _OF_PARTS)
    if not prefixes:
        raise UserError(
            f"{_KEY}.algorithm=mtp with a {student.model_type} student: its files have no layer "
            "that predicts several tokens; set algorithm=eagle3 and its draft, or speculative=null"
        )
    if not any(name.startswith(prefixes) for name in _tensor_names(directory)):
        raise UserError(
            f"{directory}: no tensor begins with {' or '.join(prefixes)}, where the layer that "
            f"predicts several tokens would be; name a directory that has it in {_KEY}.draft, or "
            "set speculative=null"
        )


def _require_eagle3(directory: Path, student: Architecture) -> None:
    settings = read_fields(directory)[1]
    names = settings.get("architectures") or ["none"]
    if "eagle3" not in str(names[0]).lower():
        raise UserError(
            f"{directory}: its config.json names the class {names[0]}, expected one of EAGLE-3, "
            f"such as LlamaForCausalLMEagle3; name such a directory in {_KEY}.draft"
        )
    given = settings.get("target_hidden_size", settings.get("hidden_size"))
    for key, value, own in (
        ("hidden_size", given, student.hidden_size),
        ("vocab_size", settings.get("vocab_size"), student.vocab_size),
    ):
        if value != own:
            raise UserError(
                f"{directory}: a draft for {key}={value}, but the student has {own}: it was made "
                f"for another model; name the student's in {_KEY}.draft"
            )
    if not any(each.suffix in _WEIGHTS for each in directory.iterdir()):
        raise UserError(f"{directory}: no *.safetensors or *.bin; download the draft's weights")


def _tensor_names(directory: Path) -> list[str]:
    """The names of the tensors in a directory's safetensors, from the index or the headers."""
    if (directory / _INDEX).is_file():
        return [*read_json_object(directory / _INDEX).get("weight_map", {})]
    names: list[str] = []
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as tensors:
                names += tensors.keys()
        except SafetensorError as error:
            raise UserError(f"{path}: not readable, {error}; download it again") from None
    return names
