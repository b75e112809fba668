"""Tiny architectures, low-rank factors and packed micro-batches that many tests share."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.files.adapted import adapted_shapes
from stable_opd_mcore.models.files.expert_stacks import file_shapes, stacked
from stable_opd_mcore.models.lora import factors_of
from stable_opd_mcore.models.weights import architecture_of, iter_hf_tensors
from stable_opd_mcore.records import MicroBatch

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,  # an expert is not cut, so no multiple of any tensor size
}
ALL_LAYERS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
SHARED = {"shared_expert_intermediate_size": 28}
DELTA_NETS = {  # three layers of four
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}
GPT_OSS = {
    "intermediate_size": 20,  # not square, because files hold an expert's matrices transposed
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 5,  # shorter than most sequences
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
ROUTED = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.7,
}
DEEPSEEK = ROUTED | {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 7,
}
YARN_OF_LATENTS = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MOONLIGHT = {
    "q_lora_rank": None,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rope_parameters": YARN_OF_LATENTS,
}
AIR = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
V2_LITE = {
    "first_k_dense_replace": 2,
    "norm_topk_prob": False,
    "rope_parameters": YARN_OF_LATENTS | {"mscale": 0.7},
}
GEMMA3 = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 5,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
    ],
    "query_pre_attn_scalar": 11,
    "pad_token_id": None,  # transformers does not train the row of this one
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
SECTIONS = {  # head_dim / 2 frequencies
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
    "patch_size": 2,
}
GEMMA3_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": EXPERTS | ALL_LAYERS,
    "qwen3_vl_text": {"rope_parameters": SECTIONS},
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": DELTA_NETS | EXPERTS | SHARED,
    "gpt_oss": GPT_OSS,
    "gemma3_text": GEMMA3,
    "glm4_moe_lite": DEEPSEEK,
    "glm4_moe": ROUTED | AIR,
    "deepseek_v3": DEEPSEEK | MOONLIGHT,
    "deepseek_v2": DEEPSEEK | V2_LITE,
    "qwen3_next": DELTA_NETS | EXPERTS | ALL_LAYERS | SHARED,
}
VOCAB_SIZE = 53  # no multiple of any tensor size: the vocabulary is padded


def tolerance(architecture: Architecture) -> float:
    """The tolerance in fp32: rounding errors grow where delta nets normalise keys."""
    return 1e-5 if architecture.delta_net is None else 1e-4


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    """The fields of a config.json with four layers; `changes` of its decoder."""
    if model_type in ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "gemma3"):
        text = config(f"{model_type}_text", **changes)
        return {
            "model_type": model_type,
            "text_config": text,
            "vision_config": GEMMA3_VISION if model_type == "gemma3" else VISION,
            "tie_word_embeddings": text["tie_word_embeddings"],
        }
    return {
        "model_type": model_type,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "hidden_act": "silu",
        **OF_FAMILIES.get(model_type, {}),
    } | changes


def architecture(model_type: str, **changes: Any) -> Architecture:
    return read_architecture(config(model_type, **changes))


def transformer(fields: dict[str, Any], seed: int) -> PreTrainedModel:
    """The model of transformers with these fields of config.json and random weights."""
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(**fields)).eval()


def redraw_factors(chunks: Sequence[Module], seed: int, std: float = 0.2) -> None:
    """Give the model other low-rank factors: their matrices B are drawn anew."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for factors in factors_of(chunks):
            for b_OR in factors.B:
                b_OR.normal_(std=std)


def write_adapter(directory: Path, architecture: Architecture, rank: int = 3) -> None:
    """An adapter of all matrices, with random factors, as PEFT saves it."""
    torch.manual_seed(rank)
    tensors: dict[str, Tensor] = {}
    for name, (outputs, inputs) in adapted_shapes(architecture).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.1 * rank}
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def add_adapter(model: Module, pairs: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """PEFT's arithmetic on transformers' own weights."""
    scale = settings["lora_alpha"] / settings["r"]
    for name in [name for name in pairs if ".lora_A." in name]:
        path = name.removeprefix("base_model.model.").split(".lora_A")[0]
        a, b = pairs[name], pairs[name.replace("lora_A", "lora_B")]
        module: Any = model.get_submodule(path.removesuffix(".base_layer"))
        if not path.endswith((".experts", ".experts.base_layer")):
            module.weight.data += scale * b @ a
            continue
        stack = module.gate_up_proj if path.endswith(".base_layer") else module.down_proj
        a_ERI, b_ORE = a.unflatten(0, (len(stack), -1)), b.unflatten(1, (-1, len(stack)))
        stack.data += scale * (b_ORE.permute(2, 0, 1) @ a_ERI).mT


def file_tensors(chunks: Sequence[Module]) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor as files hold it; see `iter_hf_tensors`."""
    architecture = architecture_of(chunks)
    is_stacked = architecture.family.stacked_experts
    shapes = file_shapes(architecture, is_stacked)
    return stacked(iter_hf_tensors(chunks), architecture, shapes, is_stacked)


def microbatch(lengths: list[int], seed: int = 0) -> MicroBatch:
    """Random sequences of these lengths, packed; every position but a sequence's last is scored."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens_T = torch.randint(0, VOCAB_SIZE, (total,), generator=generator)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    is_last = torch.zeros(total, dtype=torch.bool)
    is_last[ends[1:] - 1] = True
    rows_N = (~is_last).nonzero().squeeze(1)
    num_rows = rows_N.numel()
    zeros_N = torch.zeros(num_rows)
    return MicroBatch(
        tokens_T=tokens_T,
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=ends.to(torch.int32),
        max_seqlen=max(lengths),
        rows_N=rows_N,
        targets_N=tokens_T[rows_N + 1],
        sample_index_N=torch.zeros(num_rows, dtype=torch.int64),
        token_index_N=torch.arange(num_rows),
        turn_N=torch.zeros(num_rows, dtype=torch.int64),
        index_in_turn_N=torch.arange(num_rows),
        golden_N=torch.ones(num_rows, dtype=torch.bool),
        pg_weight_N=zeros_N,
        kl_weight_N=zeros_N,
        sft_weight_N=torch.rand(num_rows, generator=generator),
        rollout_logprob_N=zeros_N,
        repetitive_N=zeros_N.bool(),
        truncated_N=zeros_N.bool(),
        golden_rows_G=torch.arange(num_rows),
    )
