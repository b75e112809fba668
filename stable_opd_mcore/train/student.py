"""The trained model: Megatron chunks under Megatron's gradient buffers, and its Adam.

Gradients are sums over micro-batches and data-parallel ranks and are not averaged, because the
token weights already contain the global normaliser.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from stable_opd_mcore.config.schema import OptimizerConfig
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel
from stable_opd_mcore.models.layers.routers import Routers
from stable_opd_mcore.models.lora import base_hash

ADAM_BETA1, ADAM_EPS = 0.9, 1e-8


class Student:
    """Trainable pipeline chunks of this rank with their optimizer.

    Args:
        precision: "fp32" or "bf16"; gradients and main weights are fp32 either way.
    """

    def __init__(
        self,
        chunks: Sequence[HiddenStatesGPTModel],
        config: OptimizerConfig,
        precision: str,
    ):
        self.chunks = list(chunks)
        self.clip_grad = config.clip_grad
        bf16 = precision == "bf16"
        # The sum over replicas starts inside the last micro-batch's backward pass, bucket by
        # bucket. The weights' gather is not overlapped with the next forward pass: they are checked
        # and published before it, so there would be nothing to overlap with.
        replicas = chunks[0].pg_collection.dp_cp.size()
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=replicas > 1,
            use_distributed_optimizer=True,
            average_in_collective=False,
            check_for_nan_in_grad=False,  # require_finite names the step, before any weight moves
        )
        self.model: list[Any] = [
            DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        # All chunks share one config, from which the pipeline schedule takes this.
        no_sync = [chunk.no_sync for chunk in self.model]
        schedule: Any = chunks[0].config  # typed for one chunk only
        schedule.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        for chunk in chunks:
            _accumulate_in_main_grad(chunk)
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=ADAM_BETA1,
                adam_beta2=config.beta2,
                adam_eps=ADAM_EPS,
                clip_grad=config.clip_grad,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=True,
            ),
            self.model,
        )
        self.routers = Routers(chunks)
        self._grad_norm = 0.0
        self._inner = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for optimizer in self._inner:
            _correct_places(optimizer)

    @cached_property
    def base_hash(self) -> str | None:
        """See `lora.base_hash`; the frozen weights never change."""
        return base_hash(self.chunks)

    def gradient_buffers(self) -> list[Tensor]:
        """Megatron's buffers of the gradients; every parameter's gradient is a view of one."""
        return [
            buffer.grad_data
            for chunk in self.model
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Main weights (views of the model's where those are fp32) and Adam's existing moments."""
        for optimizer in self._inner:
            for group in optimizer.optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def zero_grad(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finish_grads(self) -> float:
        """Sum gradients over all ranks; returns their global L2 norm, the same on every rank."""
        finalize_model_grads(self.model, num_tokens=None)
        self.optimizer.prepare_grads()
        self._grad_norm = float(self.optimizer.get_grad_norm())
        return self._grad_norm

    def update(self, lr: float) -> None:
        """Clip to `clip_grad` and step Adam at learning rate `lr`. Call after `finish_grads`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for optimizer in self._inner:
            clip_grad_by_total_norm_fp32(
                optimizer.get_parameters(), self.clip_grad, self._grad_norm
            )
        self.optimizer.step_with_ready_grads()


def _correct_places(optimizer: Any) -> None:
    """Correct where Megatron looks for the optimizer's state of each weight, if some are in fp32.

    It assumes the order of the gradient buffers, but the optimizer puts weights in fp32 first.
    """
    if optimizer.is_stub_optimizer:  # this rank trains nothing of this kind
        return
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group, (in_fp32, others) in enumerate(groups):
        for place, weight in enumerate((*in_fp32, *others)):
            optimizer.model_param_group_index_map[weight] = group, place


def _accumulate_in_main_grad(chunk: HiddenStatesGPTModel) -> None:
    """Let Transformer Engine's layers add weight gradients to `main_grad` inside their GEMMs.

    Else each micro-batch writes a gradient in bf16, which the gradient hook reads and adds. Not by
    Megatron's setting `gradient_accumulation_fusion`: it also asks for NVIDIA's Apex, for the
    output layer, which never runs here. The torch layers have no such GEMM.
    """
    for module in chunk.modules():
        is_trained = any(weight.requires_grad for weight in module.parameters(recurse=False))
        if is_trained and hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010  # unknown to Module
