"""What a server of a run is started with: its options, and a directory with config.json.

For the trainer, whose engine knows Megatron, and for `stable-opd serve`, which starts without it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.kernel_compilers import missing_tools
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.files.adapted import sent_names
from stable_opd_mcore.placement.draft import draft_directory, draft_of, refuse_unfit_draft
from stable_opd_mcore.placement.topology import MEMORY_SHARES, sends_adapter, server_dtype
from stable_opd_mcore.rollout.sglang.checksums import CPU_MLP_MULTIPLE
from stable_opd_mcore.serving.api_key import read_api_key
from stable_opd_mcore.serving.command import ServerOptions
from stable_opd_mcore.serving.process import refuse_missing_interpreter
from stable_opd_mcore.serving.requests import UNUSED_POSITIONS


def server_options(
    config: Config,
    model: Path,
    number: int,
    gpus: tuple[int, ...],
    tensor: int,
    device: str,
    *,
    dummy_weights: bool = True,
) -> ServerOptions:
    """The options of one of the run's servers.

    Args:
        model: a directory with the config.json of what it serves.
        number: which server it is, from 0; its port follows from it.
        gpus, tensor: its GPUs on this machine, and its tensor ranks.
        dummy_weights: whether it serves the student, whose weights the run sends.
    """
    sglang = config.rollout.sglang
    served = read_architecture(model)
    is_colocated = sglang.placement == "colocated"
    return ServerOptions(
        python=sglang.python,
        model=str(model),
        device=device,
        dtype=server_dtype(config),
        host=sglang.host,
        port=sglang.port + number if sglang.port else 0,
        tensor=tensor,
        api_key=read_api_key(sglang.api_key_file),
        dummy_weights=dummy_weights,
        memory_saver=is_colocated,
        gpus=gpus,
        memory_share=MEMORY_SHARES["colocated"] if is_colocated else None,
        arguments=(
            *sglang.arguments,
            *(["--enable-return-routed-experts"] if config.rollout.routing_replay else []),
            *family_arguments(served, device, dummy_weights),
            *(_adapter_arguments(config, served, tensor, device) if dummy_weights else []),
            *(_draft_arguments(config, served, device) if dummy_weights else []),
        ),
    )


def refuse_expandable_segments(config: Config) -> None:
    """Refuse an allocator whose memory CUDA IPC cannot pass to colocated servers. For a GPU."""
    if not config.rollout.has_servers or config.rollout.sglang.transport != "tensor":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            raise UserError(
                f"{name}={value}: expandable segments cannot be shared by CUDA IPC, by which "
                f"weights reach {config.rollout.sglang.placement} servers; remove "
                f"expandable_segments: unset {name}"
            )


def refuse_unbuildable_kernels(config: Config) -> None:
    """Refuse a machine on which the run's servers cannot start, before models are loaded: their
    interpreter is missing, or what they compile kernels with. For a GPU.

    Raises:
        UserError: what is missing, with the remedy.
    """
    sglang = config.rollout.sglang
    if not config.rollout.has_servers or sglang.placement == "external":
        return
    refuse_missing_interpreter(sglang.python)
    with_draft = draft_of(config) is not None
    if missing := missing_tools(sglang.python, os.environ, with_draft=with_draft):
        raise UserError(missing)


def family_arguments(served: Architecture, device: str, is_student: bool) -> list[str]:
    """SGLang's arguments for a model of this family, where its defaults do not do."""
    if device == "cpu" and served.family.sinks:  # tools/sglang_cpu's attention with sinks
        return ["--attention-backend", "intel_amx", "--disable-hybrid-swa-memory"]
    if is_student and served.family.shared_name == "shared_experts":
        # Else SGLang holds a shared expert among the others, which no checksum here expects.
        return ["--disable-shared-experts-fusion"]
    if device != "cpu" and is_student and served.family.stacked_experts:
        # Other kernels hold experts in layouts of their own, which no checksum here expects.
        return ["--moe-runner-backend", "triton"]
    return []


def _adapter_arguments(
    config: Config, student: Architecture, tensor: int, device: str
) -> list[str]:
    """SGLang's arguments for the student's low-rank factors, where they are sent as an adapter."""
    lora = config.student.lora
    if lora is None or not sends_adapter(config, student):
        return []
    if device == "cpu" and student.ffn_hidden_size % (CPU_MLP_MULTIPLE * tensor):
        raise UserError(
            f"student.lora: SGLang on a CPU pads an MLP of width {student.ffn_hidden_size} to a "
            f"multiple of {CPU_MLP_MULTIPLE * tensor}, which the factors do not fit; set "
            "rollout.sglang.lora=merged"
        )
    arguments = [
        "--enable-lora",
        *("--max-lora-rank", str(lora.rank)),
        *("--lora-target-modules", *sent_names(student, lora.matrices)),
        *("--max-loras-per-batch", "2"),  # one, and none: a health probe names no adapter
        "--lora-strict-loading",  # refuses factors of unknown matrices instead of ignoring them
    ]
    return [*arguments, "--lora-backend", "torch_native"] if device == "cpu" else arguments


def _draft_arguments(config: Config, student: Architecture, device: str) -> list[str]:
    """SGLang's arguments for the draft of speculative decoding, whose weights come from its files.

    Raises:
        UserError: see `refuse_unfit_draft`.
    """
    settings = draft_of(config)
    if settings is None:
        return []
    refuse_unfit_draft(config, student, on_gpu=device != "cpu")
    colocated = config.rollout.sglang.placement == "colocated"
    return [
        *("--speculative-algorithm", _ALGORITHMS[settings.algorithm]),
        *("--speculative-draft-model-path", str(draft_directory(config, settings))),
        *("--speculative-draft-load-format", "auto"),  # the student's are random until a publish
        *("--speculative-num-steps", str(settings.steps)),
        *("--speculative-eagle-topk", str(settings.top_k)),
        *("--speculative-num-draft-tokens", str(settings.judged)),
        # A publish after the memory was released brings only the student.
        *(["--enable-draft-weights-cpu-backup"] if colocated else []),
    ]


_ALGORITHMS = {"mtp": "NEXTN", "eagle3": "EAGLE3"}  # SGLang's names
_ROUTER_KEYS = ("moe_layer_freq", "topk_method", "scoring_func")


def write_model_config(architecture: Architecture, directory: Path) -> Path:
    """Write a directory from which a server can start without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(model_config(architecture), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


def model_config(architecture: Architecture) -> dict[str, Any]:
    """config.json with the model class, which SGLang needs and an inline architecture may lack.

    SGLang would stop at `eos_token_id` too, and only a request's stop ids may end a response. So it
    is null: where it is absent, Llama's is 2. SGLang uses a few positions fewer than the window
    that it reads: it cuts responses there silently, and refuses longer prompts.
    """
    own_class = {"architectures": [architecture.family.sglang_class]}
    window = architecture.max_positions + UNUSED_POSITIONS
    own = {"eos_token_id": None, "max_position_embeddings": window}
    source = architecture.source
    if (text_type := architecture.family.text_type) is not None:
        own |= {"tie_word_embeddings": architecture.tied, "model_type": text_type}
        source = _without_sections(source["text_config"])
    if architecture.family.dense_layers is not None:
        # SGLang reads only this key, and has no use for layers that are not trained.
        own |= {"first_k_dense_replace": architecture.num_dense_layers}
        own |= {"num_nextn_predict_layers": 0}
        # It reads keys that transformers' settings lack, whose only value here the family knows.
        known = architecture.family.supported
        own |= {key: known[key] for key in _ROUTER_KEYS if key in known}
        if (experts := architecture.experts) is not None:  # it needs both, even without groups
            own |= {"n_group": experts.num_groups, "topk_group": experts.groups_per_token}
    if architecture.delta_net is not None:
        own |= {"full_attention_interval": _attention_interval(architecture)}
    return own_class | source | own


def _without_sections(text: dict[str, Any]) -> dict[str, Any]:
    """The settings of a decoder that is served by itself. The sections of its rotary positions are
    for images: all three positions of a text's token are equal."""
    rotary = {
        key: {name: each for name, each in text[key].items() if not name.startswith("mrope_")}
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(text.get(key), dict)
    }
    return {**text, **rotary}


def _attention_interval(architecture: Architecture) -> int:
    """The number n of which every n-th layer has attention, as SGLang reads it."""
    layers = range(architecture.num_layers)
    every = next(layer for layer in layers if layer not in architecture.delta_layers) + 1
    if architecture.delta_layers != tuple(i for i in layers if (i + 1) % every):
        raise UserError(
            f"layer_types: gated delta nets in layers {list(architecture.delta_layers)} of "
            f"{architecture.num_layers}; SGLang serves only models with attention in every n-th "
            "layer: take another model, or set rollout.engine=embedded"
        )
    return every
