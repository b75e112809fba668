"""Which grids of ranks can hold a model."""

from __future__ import annotations

from stable_opd_mcore.models.description.architecture import Architecture


def layout_refusal(
    architecture: Architecture,
    tensor: int,
    pipeline: int,
    num_chunks: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
    sequence: bool = True,
) -> str | None:
    """Why these ranks, with `num_chunks` on each stage, cannot hold the model; None if they can."""
    experts, net = architecture.experts, architecture.delta_net
    for name, number in _cut_over_tensor_ranks(architecture).items():
        if number % tensor:
            return (
                f"parallel.tensor={tensor} does not divide {name}={number} of this "
                f"{architecture.model_type} model: choose a tensor size among "
                f"{divisors(architecture.num_key_value_heads)}"
            )
    kinds = {
        "a gated delta net": net is not None,
        "an attention sink": architecture.family.sinks,
    }
    needs_whole = next((kind for kind, is_here in kinds.items() if is_here), None)
    if context > 1 and needs_whole is not None:
        return (
            f"parallel.context={context}: {needs_whole} of this "
            f"{architecture.model_type} model needs whole sequences on a rank; set "
            "parallel.context=1, and for memory a larger parallel.tensor or train.recompute=full"
        )
    stages = pipeline * num_chunks
    if architecture.num_layers % stages:
        return (
            f"{architecture.num_layers} layers do not divide into parallel.pipeline={pipeline} x "
            f"parallel.virtual_pipeline={num_chunks} = {stages} stages: choose a product among "
            f"{divisors(architecture.num_layers)}"
        )
    if experts is None:
        return None
    if experts.number % expert:
        return (
            f"parallel.expert={expert} does not divide the {experts.number} experts of this "
            f"{architecture.model_type} model: choose among {divisors(experts.number)}"
        )
    if tensor > 1 and not sequence:
        return (
            f"parallel.tensor={tensor} with parallel.sequence=false: every tensor rank would send "
            f"the same tokens to the experts of this {architecture.model_type} model; set "
            "parallel.sequence=true"
        )
    return None


def _cut_over_tensor_ranks(architecture: Architecture) -> dict[str, int]:
    """The sizes, by their keys in config.json, that tensor ranks must divide."""
    width = "shared_expert_intermediate_size" if architecture.experts else "intermediate_size"
    if architecture.family.shared_name == "shared_experts":
        width = "n_shared_experts x moe_intermediate_size"
    net = architecture.delta_net
    return {
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        width: architecture.dense_width,
        **({"intermediate_size": architecture.mlp_width} if architecture.num_dense_layers else {}),
        **({} if net is None else {"linear_num_key_heads": net.num_key_heads}),
    }


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
