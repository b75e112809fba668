"""Build this rank's chunks of a model, with random weights; a virtual pipeline has several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from stable_opd_mcore.config.training import Fp8, Recompute
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.description.families import Family
from stable_opd_mcore.models.description.layout_refusal import layout_refusal
from stable_opd_mcore.models.hidden_states import FactorList, HiddenStatesGPTModel
from stable_opd_mcore.models.layers.attention_backend import attentions_of_engine
from stable_opd_mcore.models.layers.attention_sinks import refuse_sinks_on_device
from stable_opd_mcore.models.layers.fp8 import (
    MULTIPLE,
    megatron_settings,
    refuse_fp8,
    refuse_fp8_on_device,
)
from stable_opd_mcore.models.layers.linear import emulate_fp8
from stable_opd_mcore.models.layers.path_attention import follow_paths
from stable_opd_mcore.models.layers.rotary import RotaryByPosition, StackedRotary
from stable_opd_mcore.models.spec import layer_spec, transformer_engine_is_usable
from stable_opd_mcore.models.weights import described_parameters, mark_shards, random_weights
from stable_opd_mcore.parallel.world import World

Precision = Literal["fp32", "bf16"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(
    architecture: Architecture,
    world: World,
    *,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    fp8: Fp8 | None = None,
    trainable: bool = True,
    seed: int | None = 0,
) -> list[HiddenStatesGPTModel]:
    """This rank's chunks, with random weights that depend on `seed` and not on the layout.

    Args:
        fp8: of the layers' products; None: they are in `precision`.
        trainable: False gives a frozen model in evaluation mode.
        seed: None leaves the weights undefined, for load_hf or copy_weights to fill; random weights
            of a large model take minutes.

    Raises:
        UserError: the layout does not suit the architecture, Transformer Engine would attend over
            slices in fp32, cuDNN has no attention with sinks, or `fp8` does not suit sizes,
            precision or GPU.
    """
    _refuse_unfit(architecture, world, precision, fp8)
    config = transformer_config(architecture, world, precision, recompute, fp8, trainable)
    # Under no_grad Transformer Engine keeps no second copy of weights in FP8, for gradients.
    with nullcontext() if trainable else torch.no_grad():
        chunks = [
            _build_chunk(architecture, world, config, stage, fp8)
            for stage in range(world.num_chunks)
        ]
    mark_shards(chunks)
    if seed is not None:
        random_weights(chunks, seed)
    for chunk in chunks:
        chunk.train(trainable)
        chunk.requires_grad_(trainable)
    for _, weight, entry in described_parameters(chunks):
        if entry.is_fixed:
            weight.requires_grad_(False)
    return chunks


def _refuse_unfit(
    architecture: Architecture, world: World, precision: Precision, fp8: Fp8 | None
) -> None:
    """Raise the errors of `build_model`."""
    reason = layout_refusal(
        architecture,
        world.tensor_size,
        world.pipeline_size,
        world.num_chunks,
        context=world.context_size,
        expert=world.expert_size,
        sequence=world.sequence_parallel,
    )
    if reason is not None:
        raise UserError(reason)
    fused = transformer_engine_is_usable()
    if world.context_size > 1 and precision == "fp32" and fused:
        raise UserError(
            f"parallel.context={world.context_size} with train.precision=fp32: Transformer Engine "
            "attends over slices in bf16 only; set train.precision=bf16 or parallel.context=1"
        )
    if fused and architecture.family.sinks:
        refuse_sinks_on_device()
    if fp8 is not None:
        needed = precision if fused else None
        refuse_fp8(architecture, fp8, tensor=world.tensor_size, precision=needed)
        if fused:
            refuse_fp8_on_device(fp8)


def transformer_config(
    architecture: Architecture,
    world: World,
    precision: Precision,
    recompute: Recompute,
    fp8: Fp8 | None,
    trainable: bool,
) -> TransformerConfig:
    """Megatron's settings for an architecture on this layout."""
    dtype = _DTYPES[precision]
    fused = transformer_engine_is_usable()
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.mlp_width,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        qk_layernorm=architecture.family.qk_norm,
        add_bias_linear=architecture.family.biases,
        **_attention_config(architecture),
        **_activation_config(architecture.family, fused=fused),
        layernorm_zero_centered_gamma=architecture.family.zero_centred_norms,
        hetereogenous_dist_checkpoint=architecture.has_unlike_layers,  # Megatron's spelling
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=architecture.initializer_range,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        **_layout_config(world),
        **_experts_config(architecture, world),
        **_recompute_config(architecture, recompute),
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        calculate_per_token_loss=True,  # losses are sums: Megatron divides by nothing
        gradient_accumulation_fusion=False,  # train/student.py does it without Apex
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
        # Megatron's own fusions are torch.compile, which compiles again when the number of tokens
        # changes. SwiGLU is Transformer Engine's kernel; without dropout and bias the third fusion
        # would be one addition.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=fused,
        **(megatron_settings(fp8, trainable=trainable) if fp8 and fused else {}),
    )


def _attention_config(architecture: Architecture) -> dict[str, Any]:
    """Megatron's settings of the attention, without its sizes."""
    family, window = architecture.family, architecture.sliding_window
    settings: dict[str, Any] = {
        "add_qkv_bias": architecture.qkv_bias,
        "softmax_scale": architecture.softmax_scale,
        "attention_output_gate": family.gated_attention,
        "softmax_type": "learnable" if family.sinks else "vanilla",
    }
    if window is not None:
        layers = range(architecture.num_layers)
        settings["window_size"] = (window - 1, 0)  # tokens before and after the token itself
        settings["window_attn_skip_freq"] = [n in architecture.sliding_layers for n in layers]
        settings["cp_comm_type"] = "all_gather"  # Transformer Engine's ring has no windows
    return settings


def _activation_config(family: Family, *, fused: bool) -> dict[str, Any]:
    """Megatron's settings of the MLPs' gated activation."""
    if family.gelu:
        gelu = partial(torch.nn.functional.gelu, approximate="tanh")
        return {"gated_linear_unit": True, "activation_func": gelu}
    if family.glu_limit is None:
        silu = torch.nn.functional.silu
        return {"gated_linear_unit": True, "activation_func": silu, "use_te_activation_func": fused}
    return {
        "gated_linear_unit": True,
        "activation_func": _quick_gelu,
        "activation_func_clamp_value": family.glu_limit,
        "glu_linear_offset": 1.0,
    }


def _quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x). Megatron's own is compiled again when the number of tokens changes."""
    return x * torch.sigmoid(1.702 * x)


def _layout_config(world: World) -> dict[str, Any]:
    """Megatron's settings of the ranks and of the messages between pipeline stages."""
    interleaved = world.virtual_pipeline is not None
    return {
        "tensor_model_parallel_size": world.tensor_size,
        "sequence_parallel": world.sequence_parallel,
        "context_parallel_size": world.context_size,
        "pipeline_model_parallel_size": world.pipeline_size,
        "virtual_pipeline_model_parallel_size": world.virtual_pipeline,
        # Packed micro-batches differ in length. Megatron demands this dispatcher with that option,
        # for dense models too.
        "variable_seq_lengths": world.pipeline_size > 1,
        "moe_token_dispatcher_type": "alltoall",
        # With two interleaved stages, a batch of both directions swaps their messages.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "batch_p2p_sync": False,  # a device synchronisation per message, for old torch versions
    }


def _recompute_config(architecture: Architecture, recompute: Recompute) -> dict[str, Any]:
    """Megatron's settings of what the backward pass computes again."""
    if recompute == "none":
        return {}
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    # Megatron's default, the attention, keeps nothing large when it is fused; norms are fused into
    # Transformer Engine's linear layers. The MLP keeps most of a layer's activations.
    modules = ["moe"] if architecture.experts else ["mlp"]
    if architecture.num_dense_layers:
        modules.append("mlp")
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _experts_config(architecture: Architecture, world: World) -> dict[str, Any]:
    """Megatron's settings of the routers and experts; nothing for a dense model."""
    experts, family = architecture.experts, architecture.family
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.number,
        "moe_ffn_hidden_size": architecture.ffn_hidden_size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalised,
        "moe_shared_expert_intermediate_size": experts.shared_width,
        "moe_shared_expert_gate": bool(experts.shared_width) and family.shared_expert_gate,
        "moe_router_topk_scaling_factor": None if experts.scale == 1.0 else experts.scale,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": transformer_engine_is_usable(),
        "expert_model_parallel_size": world.expert_size,
        "expert_tensor_parallel_size": 1,  # matrices are narrow; expert ranks save as much memory
    }


def _build_chunk(
    architecture: Architecture,
    world: World,
    config: TransformerConfig,
    stage: int,
    fp8: Fp8 | None,
) -> HiddenStatesGPTModel:
    vp_stage = stage if world.virtual_pipeline is not None else None
    chunk = HiddenStatesGPTModel(
        config,
        layer_spec(config, architecture, vp_stage, world.pipeline_rank),
        vocab_size=-(-architecture.vocab_size // world.tensor_size) * world.tensor_size,
        max_sequence_length=architecture.max_positions,
        pre_process=world.pipeline_rank == 0 and stage == 0,
        post_process=world.is_last_stage and stage == world.num_chunks - 1,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=int(architecture.rotary.theta),
        pg_collection=world.groups,
        vp_stage=vp_stage,
    )
    chunk.architecture = architecture
    chunk.factors = FactorList()
    for attention in attentions_of_engine(chunk):
        follow_paths(attention)
    leave_out_activations(chunk)
    _forget_routing(chunk)
    chunk.to(config.params_dtype)
    for _, weight, entry in described_parameters([chunk]):
        if entry.fp32:
            weight.data = weight.data.float()
    _set_rotary(chunk, config.params_dtype, world.device)
    if architecture.family.scaled_embedding and chunk.pre_process:
        # As in transformers, the factor is rounded to the weights' precision.
        root = torch.tensor(architecture.hidden_size**0.5, dtype=config.params_dtype)
        chunk.embedding.register_forward_hook(partial(_multiplied, root.item()))
    if fp8 is not None:
        chunk.token_multiple = MULTIPLE
        emulate_fp8(chunk, fp8)
    return chunk.to(world.device)


def _multiplied(factor: float, _module: object, _inputs: object, output: Tensor) -> Tensor:
    return output * factor


def _set_rotary(chunk: HiddenStatesGPTModel, dtype: torch.dtype, device: torch.device) -> None:
    """Give the chunk the rotary positions of its architecture, and its layers their choice."""
    architecture = chunk.architecture
    frequencies = [rotary.frequencies() for rotary in architecture.rotaries()]
    if architecture.latent is not None or not transformer_engine_is_usable():
        chunk.rotary_pos_emb = RotaryByPosition(frequencies, dtype)
    else:
        of_first = chunk.rotary_pos_emb
        every = [copy(of_first) for _ in frequencies]
        for each, own in zip(every, frequencies, strict=True):
            each.inv_freq = own.to(device)
        chunk.rotary_pos_emb = every[0] if len(every) == 1 else StackedRotary(every)
    layers: Any = chunk.decoder.layers
    for layer in layers:
        layer.self_attention.rotary = int(layer.layer_number - 1 in architecture.local_layers)


def leave_out_activations(chunk: torch.nn.Module) -> None:
    """Let Megatron 0.16 save an MLP with an activation module, which lacks sharded_state_dict."""
    for module in chunk.modules():
        activation: Any = getattr(module, "activation_func", None)
        if isinstance(activation, torch.nn.Module):
            activation.sharded_state_dict = lambda *_, **__: {}  # pyright: ignore


def _forget_routing(chunk: torch.nn.Module) -> None:
    """Let dispatchers forget a micro-batch's routing after use: it holds what recompute saved."""
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            dispatcher: Any = module.token_dispatcher
            combine = dispatcher.combine_postprocess
            dispatcher.combine_postprocess = partial(_combine_and_forget, dispatcher, combine)


def _combine_and_forget(
    dispatcher: Any, combine: Callable[[Tensor], Tensor], outputs: Tensor
) -> Tensor:
    combined = combine(outputs)
    dispatcher.probs = dispatcher.routing_map = None
    dispatcher.reversed_local_input_permutation_mapping = None
    return combined
