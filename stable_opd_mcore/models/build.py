"""Build this rank's chunks of a model, with random weights.

    architecture = read_architecture(path)
    chunks = build_model(architecture, world, precision="bf16", recompute="none", trainable=True)
    load_hf(chunks, path)                               # huggingface.py

A rank's part of a model is a list of chunks: one, or several with a virtual pipeline. Not here: the
reduction of gradients and the optimizer (train/student.py).
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.attention import RotaryByPosition
from stable_opd_mcore.models.families import Architecture, rotary_frequencies
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.spec import layer_spec, transformer_engine_is_usable
from stable_opd_mcore.models.weights import mark_shards, random_weights
from stable_opd_mcore.parallel.world import World

Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(
    architecture: Architecture,
    world: World,
    *,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    trainable: bool = True,
    seed: int | None = 0,
) -> list[HiddenStatesGPTModel]:
    """This rank's chunks, with random weights that depend on `seed` and not on the layout.

    Args:
        trainable: False gives a frozen model in evaluation mode.
        seed: None leaves the weights undefined, for load_hf or copy_weights to fill; drawing the
            weights of a large model takes minutes.

    Raises:
        UserError: parallel.tensor does not divide the heads, the pipeline stages do not divide the
            layers, or Transformer Engine would attend over slices in fp32.
    """
    check_layout(architecture, world)
    _check_attention(world, precision)
    config = transformer_config(architecture, world, precision, recompute)
    chunks = [_build_chunk(architecture, world, config, stage) for stage in range(world.num_chunks)]
    mark_shards(chunks)
    if seed is not None:
        random_weights(chunks, seed)
    for chunk in chunks:
        chunk.train(trainable)
        chunk.requires_grad_(trainable)
    return chunks


def check_layout(architecture: Architecture, world: World) -> None:
    """Refuse a layout that cannot hold this architecture; see `build_model`."""
    sizes = _divisors(architecture.num_key_value_heads)
    for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        number = getattr(architecture, name)
        if number % world.tensor_size:
            raise UserError(
                f"parallel.tensor={world.tensor_size} does not divide {name}={number} of this "
                f"{architecture.model_type} model: choose a tensor size among {sizes}"
            )
    stages = world.pipeline_size * world.num_chunks
    if architecture.num_layers % stages:
        raise UserError(
            f"{architecture.num_layers} layers do not divide into parallel.pipeline="
            f"{world.pipeline_size} x parallel.virtual_pipeline={world.num_chunks} = {stages} "
            f"stages: choose a product among {_divisors(architecture.num_layers)}"
        )


def _check_attention(world: World, precision: Precision) -> None:
    if world.context_size > 1 and precision == "fp32" and transformer_engine_is_usable():
        raise UserError(
            f"parallel.context={world.context_size} with train.precision=fp32: Transformer Engine "
            "attends over slices in bf16 only; set train.precision=bf16 or parallel.context=1"
        )


def transformer_config(
    architecture: Architecture, world: World, precision: Precision, recompute: Recompute
) -> TransformerConfig:
    """Megatron's settings for an architecture on this layout."""
    dtype = _DTYPES[precision]
    fused = transformer_engine_is_usable()
    interleaved = world.virtual_pipeline is not None
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        qk_layernorm=architecture.family.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.family.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=architecture.initializer_range,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        tensor_model_parallel_size=world.tensor_size,
        sequence_parallel=world.sequence_parallel,
        context_parallel_size=world.context_size,
        pipeline_model_parallel_size=world.pipeline_size,
        virtual_pipeline_model_parallel_size=world.virtual_pipeline,
        # Packed micro-batches differ in length. Megatron demands this dispatcher with that option,
        # for dense models too.
        variable_seq_lengths=world.pipeline_size > 1,
        moe_token_dispatcher_type="alltoall",
        # With two interleaved stages, a batch of both directions swaps their messages.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,  # a device synchronisation per message, for old torch versions
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        calculate_per_token_loss=True,  # losses are sums: Megatron divides by nothing
        recompute_granularity=None if recompute == "none" else recompute,
        # Megatron's default, the attention, keeps nothing large when it is fused; norms are fused
        # into Transformer Engine's linear layers. The MLP keeps most of a layer's activations.
        recompute_modules=["mlp"] if recompute == "selective" else None,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        gradient_accumulation_fusion=False,  # train/student.py does it without Apex
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
        # Megatron's own fusions are torch.compile, which compiles again when the number of tokens
        # changes. SwiGLU is Transformer Engine's kernel; without dropout and bias the third fusion
        # would be one addition.
        use_te_activation_func=fused,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=fused,
    )


def _build_chunk(
    architecture: Architecture, world: World, config: TransformerConfig, stage: int
) -> HiddenStatesGPTModel:
    vp_stage = stage if world.virtual_pipeline is not None else None
    chunk = HiddenStatesGPTModel(
        config,
        layer_spec(config, vp_stage, world.pipeline_rank),
        vocab_size=-(-architecture.vocab_size // world.tensor_size) * world.tensor_size,
        max_sequence_length=architecture.max_positions,
        pre_process=world.is_first_stage and stage == 0,
        post_process=world.is_last_stage and stage == world.num_chunks - 1,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=int(architecture.rope_theta),
        pg_collection=world.groups,
        vp_stage=vp_stage,
    )
    chunk.architecture = architecture
    chunk.to(config.params_dtype)
    frequencies = rotary_frequencies(architecture)
    if transformer_engine_is_usable():
        chunk.rotary_pos_emb.inv_freq = frequencies.to(world.device)
    else:
        chunk.rotary_pos_emb = RotaryByPosition(frequencies, config.params_dtype)
    return chunk.to(world.device)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
