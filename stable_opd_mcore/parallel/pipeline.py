"""Run micro-batches through a model, pipelined by Megatron where there are several stages.

The loss of a step is the sum over micro-batches, because token weights hold the global normaliser,
so nothing is divided here. The caller reduces gradients by finalize_model_grads once afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.parallel.world import World

MicroBatch = TypeVar("MicroBatch")
LossFunction = Callable[[Tensor], Any]


def run_forward_backward(
    chunks: Sequence[Module],
    microbatches: Sequence[MicroBatch],
    forward_step: Callable[[Module, MicroBatch], tuple[Tensor, LossFunction]],
    *,
    world: World,
    forward_only: bool = False,
) -> list[Any]:
    """Forward, and unless `forward_only` backward, of all micro-batches.

    Args:
        microbatches: the same list on all tensor and pipeline ranks of the replica.
        forward_step: runs one chunk on one micro-batch; returns its output tensor and a function of
            the last stage's output. That function returns (loss, result), where loss is a
            differentiable scalar; with `forward_only` it returns only the result.

    Returns:
        The results in micro-batch order on the last pipeline stage, an empty list elsewhere.
    """
    # Every rank has at least one, which may be empty: packing ensures it.
    assert microbatches and len(microbatches) % world.microbatch_multiple == 0, len(microbatches)

    def step(source: Iterator[MicroBatch], chunk: Module) -> tuple[Tensor, LossFunction]:
        output, function = forward_step(chunk, next(source))
        if forward_only:
            return output, lambda tensor, **_: function(tensor)
        return output, lambda tensor: _as_sum(function(tensor))

    # Without this setting Megatron divides losses by the number of micro-batches.
    assert forward_only or get_model_config(chunks[0]).calculate_per_token_loss
    run = get_forward_backward_func()
    with torch.no_grad() if forward_only else nullcontext():
        results = run(
            forward_step_func=step,
            data_iterator=[iter(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=1,  # lengths travel with the tensors: variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    for chunk in chunks:  # a later stage would keep its last input until the next step
        set_input_tensor: Any = get_attr_wrapped_model(chunk, "set_input_tensor")
        set_input_tensor(None)
    return results


def _as_sum(loss_and_result: tuple[Tensor, Any]) -> tuple[Tensor, Tensor, Any]:
    """What Megatron takes: loss, token count, result. It does not divide by this count of zero."""
    loss, result = loss_and_result
    return loss, torch.zeros([], dtype=torch.int32, device=loss.device), result
