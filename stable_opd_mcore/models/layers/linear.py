"""The products of the torch layers, which oneDNN computes in fp32 on a CPU.

torch gives them to MKL, which is slower on some CPUs (BENCHMARKS.md). Weight gradients, for
which MKL is as fast, are added directly to Megatron's `main_grad`.

Shapes: T tokens, H inputs, O outputs of this rank's part of a matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from stable_opd_mcore.config.training import Fp8
from stable_opd_mcore.losses.output_head import announce_main_grad
from stable_opd_mcore.models.layers.fp8_emulation import ROUNDINGS, Rounding, fp8_linear

# The operators that torch's Inductor calls in frozen models.
_onednn: Any = torch.ops.mkldnn


def linear(input: Tensor, weight_OH: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` without gradients: input [..., H] to [..., O]."""
    is_available = torch.backends.mkldnn.is_available()
    if is_available and weight_OH.is_cpu and weight_OH.dtype == torch.float32:
        return _onednn._linear_pointwise(input, weight_OH, bias_O, "none", [], "")
    return F.linear(input, weight_OH, bias_O)


class _Product(torch.autograd.Function):
    """input [..., H] times weight [O, H] transposed, plus the bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight_OH)
        return linear(input, weight_OH, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight_OH = ctx.saved_tensors
        gradient_TO = gradients[0].flatten(0, -2)
        of_input, of_weight_OH, of_bias_O = None, None, None
        if ctx.needs_input_grad[0]:
            of_input = linear(gradients[0], weight_OH.t())
        if ctx.needs_input_grad[1]:
            of_weight_OH = _weight_gradient(weight_OH, gradient_TO, input.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            of_bias_O = gradient_TO.sum(dim=0)
        return of_input, of_weight_OH, of_bias_O


def _weight_gradient(weight_OH: Tensor, gradient_TO: Tensor, input_TH: Tensor) -> Tensor | None:
    """None where it has been added to a `main_grad` of its dtype."""
    main_grad: Tensor | None = getattr(weight_OH, "main_grad", None)
    if main_grad is None or main_grad.dtype != gradient_TO.dtype:
        return gradient_TO.t() @ input_TH
    main_grad.addmm_(gradient_TO.t(), input_TH)
    announce_main_grad(weight_OH)
    return None


class TorchLinear:
    """What replaces the product in Megatron's linear layers.

    A product that also sends messages over tensor ranks stays Megatron's, except in FP8. There the
    whole input is rounded after it is gathered, which gives Transformer Engine's values.
    """

    rounding: Rounding | None = None  # set for a layer in FP8

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        gathers, sums = options["sequence_parallel"], options["allreduce_dgrad"]
        if self.rounding is not None:
            if gathers:
                input = gather_from_sequence_parallel_region(input, group=options["tp_group"])
            elif sums:
                input = copy_to_tensor_model_parallel_region(input, group=options["tp_group"])
            rounded = fp8_linear(input, weight, self.rounding)
            return rounded if bias is None else rounded + bias
        if gathers or sums:
            megatron: Any = super()
            return megatron._forward_impl(input, weight, bias, **options)
        output: Any = _Product.apply(input, weight, bias)
        return output


def emulate_fp8(chunk: Any, fp8: Fp8) -> None:
    """Make the torch layers of a chunk round to FP8; Transformer Engine's do so themselves."""
    for layer in chunk.decoder.layers:
        for module in layer.modules():
            if isinstance(module, TorchLinear):
                module.rounding = ROUNDINGS[fp8.recipe]


def linear_options(config: Any, tp_group: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Megatron's layers of a mixer without biases are built with, whose weights are read
    later: one whose outputs tensor ranks share, and the last one, whose inputs they share."""
    both: dict[str, Any] = {
        "config": config,
        "init_method": lambda weight: weight,
        "bias": False,
        "is_expert": False,
        "tp_group": tp_group,
    }
    column = both | {"gather_output": False, "skip_bias_add": False}
    return column, both | {"input_is_parallel": True, "skip_bias_add": True}


class ReplicatedLinear(torch.nn.Module):
    """A layer whose matrix every tensor rank has whole, for its own tokens; never in FP8."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        output: Any = _Product.apply(input, self.weight, None)
        return output, None


class TorchColumnLinear(TorchLinear, ColumnParallelLinear):
    """Megatron's layer with rows of the matrix on each tensor rank."""


def biased(linear: type[Any]) -> type[Any]:
    """A layer of this class with a bias, where Megatron's settings say that layers have none."""

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        linear.__init__(self, *arguments, **options | {"bias": True})

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": __init__})


class TorchRowLinear(TorchLinear, RowParallelLinear):
    """Megatron's layer with columns of the matrix on each tensor rank."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        if self.is_expert and bias is not None:
            output = output.clone()  # Megatron adds the bias in place, which a view does not allow
        return output, bias
