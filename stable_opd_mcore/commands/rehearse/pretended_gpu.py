"""A GPU that only answers questions, for code that cannot be built without one.

    pretend_gpu()                   # before the first import of Megatron
    from stable_opd_mcore.models.gpt import build_model

Transformer Engine's layers can then be built on the CPU, by Megatron as it is. Nothing computes:
their kernels need the GPU. torch is changed for good, so a process of its own does this.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # refuses the answers below if they are in place before it is imported

from stable_opd_mcore.parallel.cuda_facade import FACADE

_GPUS = 8
_CAPABILITY = (9, 0)  # a Hopper GPU's
_HOPPER = SimpleNamespace(
    name="H200", major=9, minor=0, multi_processor_count=132, total_memory=141 * 2**30
)


def pretend_gpu() -> None:
    """Make `torch.cuda` answer as on a node with Hopper GPUs, and do nothing."""
    answers = {name: value for name, value in vars(FACADE).items() if not name.startswith("__")}
    answers.update(
        is_available=lambda: True,
        device_count=lambda: _GPUS,
        current_device=lambda: 0,
        get_device_capability=lambda *unused: _CAPABILITY,
        get_device_properties=lambda *unused: _HOPPER,
        default_generators=(torch.default_generator,) * _GPUS,
    )
    for name, value in answers.items():
        setattr(torch.cuda, name, value)


def skip_quantisation(transformer_engine: Any) -> None:
    """Have weights in FP8 made without values, by this module transformer_engine_torch."""

    def quantise(tensor: torch.Tensor, quantizer: Any, output: Any = None, *unused: Any) -> Any:
        if output is not None:
            return output
        parts = quantizer.alloc_tensors(tensor.shape, device=tensor.device)
        described = quantizer.create_metadata(tensor.shape, dtype=tensor.dtype)
        return described["cls"].__tensor_unflatten__(
            parts, described, tensor.shape, tensor.stride()
        )

    transformer_engine.quantize = quantise
