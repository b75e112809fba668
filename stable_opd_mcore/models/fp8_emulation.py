"""Linear layers whose operands are rounded to FP8 and back: FP8 where Transformer Engine is absent.

Values are cast to `float8_e4m3fn` or `float8_e5m2` with a recipe's scales, cast back, and
multiplied in fp32, as an FP8 GEMM accumulates. What FP8 does to a model can so be measured on a
CPU. It is slower than the layers that it replaces. Recipes, as Transformer Engine defines them:

    tensorwise  one scale per tensor, from its own largest magnitude; gradients in e5m2
    blockwise   e4m3 with powers of two as scales: weights in blocks of 128 x 128, inputs and
                gradients in runs of 128 along the dimension that is summed over

Shapes: T tokens, H inputs, O outputs of this rank's part of a matrix. Not here: which layers are in
FP8 (fp8.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from stable_opd_mcore.config.training import Fp8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """What the largest magnitude is multiplied with to become the format's largest number.

    1 where `amax` is 0 or not finite. Transformer Engine's compute_scale_from_amax
    (common/recipe/recipe_common.cuh).
    """
    scale = torch.finfo(dtype).max / amax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)  # of an amax near 0
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def block_scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale_of`, rounded down to a power of two, so nothing overflows."""
    scale = scale_of(amax, dtype)
    _, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - 1)


def round_trip(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 x, times `scale` in FP8 and back. Too large values become the largest."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype).float() * scale.reciprocal()


def round_tensor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """With one scale, from the largest magnitude of x."""
    return round_trip(x, scale_of(amax_of(x), dtype), dtype)


def round_blocks(x_RC: Tensor, rows: int, columns: int) -> Tensor:
    """With a scale for each block of rows x columns; blocks at the ends are smaller."""
    num_rows, num_columns = x_RC.shape
    if not x_RC.numel():
        return x_RC
    magnitudes = F.pad(x_RC.abs(), (0, -num_columns % columns, 0, -num_rows % rows))
    amax = magnitudes.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))
    scale = block_scale_of(amax, E4M3)
    scale_RC = scale.repeat_interleave(rows, 0)[:num_rows].repeat_interleave(columns, 1)
    return round_trip(x_RC, scale_RC[:, :num_columns], E4M3)


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, 0 of no values."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


@dataclass(frozen=True)
class Operands:
    """What an FP8 GEMM multiplies, rounded, in fp32."""

    input_TH: Tensor  # of the product that gives the output
    input_for_weight_TH: Tensor  # of the product that gives the weight's gradient
    weight_OH: Tensor


class Rounding(Protocol):
    """How a recipe rounds the operands of one layer, given in fp32."""

    def operands(self, input_TH: Tensor, weight_OH: Tensor) -> Operands: ...

    def gradients(self, gradient_TO: Tensor) -> tuple[Tensor, Tensor]:
        """The output's gradient, for the gradient of the input and for that of the weight."""
        ...


class Tensorwise:
    """Current scaling."""

    def operands(self, input_TH: Tensor, weight_OH: Tensor) -> Operands:
        rounded_TH = round_tensor(input_TH, E4M3)
        return Operands(rounded_TH, rounded_TH, round_tensor(weight_OH, E4M3))

    def gradients(self, gradient_TO: Tensor) -> tuple[Tensor, Tensor]:
        rounded_TO = round_tensor(gradient_TO, E5M2)
        return rounded_TO, rounded_TO


class Blockwise:
    """A product that sums over T needs runs along T, so such operands are rounded twice."""

    def operands(self, input_TH: Tensor, weight_OH: Tensor) -> Operands:
        return Operands(
            round_blocks(input_TH, 1, BLOCK),
            round_blocks(input_TH, BLOCK, 1),
            round_blocks(weight_OH, BLOCK, BLOCK),
        )

    def gradients(self, gradient_TO: Tensor) -> tuple[Tensor, Tensor]:
        return round_blocks(gradient_TO, 1, BLOCK), round_blocks(gradient_TO, BLOCK, 1)


ROUNDINGS: dict[Fp8Recipe, Rounding] = {"tensorwise": Tensorwise(), "blockwise": Blockwise()}


class _Product(torch.autograd.Function):
    """input [..., H] times weight [O, H] transposed, in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OH: Tensor, rounding: Rounding) -> Tensor:
        input_TH = input.flatten(0, -2).float()
        operands = rounding.operands(input_TH, weight_OH.float())
        ctx.save_for_backward(operands.input_for_weight_TH, operands.weight_OH)
        ctx.rounding, ctx.shape = rounding, input.shape
        ctx.dtypes = (input.dtype, weight_OH.dtype)
        output_TO = operands.input_TH @ operands.weight_OH.t()
        return output_TO.to(input.dtype).view(*input.shape[:-1], weight_OH.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        input_TH, weight_OH = ctx.saved_tensors
        gradient_TO = gradients[0].flatten(0, -2).float()
        for_input_TO, for_weight_TO = ctx.rounding.gradients(gradient_TO)
        of_input = (for_input_TO @ weight_OH).view(ctx.shape)
        of_weight_OH = for_weight_TO.t() @ input_TH
        return of_input.to(ctx.dtypes[0]), of_weight_OH.to(ctx.dtypes[1]), None


def fp8_linear(input: Tensor, weight_OH: Tensor, rounding: Rounding) -> Tensor:
    """input [..., H] times weight [O, H] transposed, with operands and gradients rounded.

    Returns:
        [..., O] in the input's dtype.
    """
    output: Any = _Product.apply(input, weight_OH, rounding)
    return output


class EmulatedLinear:
    """What replaces the product in Megatron's linear layers; its communication stays.

    Under sequence parallelism the whole input is rounded after it is gathered. Transformer Engine
    rounds the slices before, with one scale for all of them: the same values.
    """

    rounding: Rounding

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **unused: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = fp8_linear(input, weight, self.rounding)
        return output if bias is None else output + bias


class EmulatedColumnLinear(EmulatedLinear, ColumnParallelLinear):
    """Megatron's layer with rows of the matrix on each tensor rank."""


class EmulatedRowLinear(EmulatedLinear, RowParallelLinear):
    """Megatron's layer with columns of the matrix on each tensor rank."""


def set_rounding(chunk: torch.nn.Module, recipe: Fp8Recipe) -> None:
    """Give a chunk's emulated layers their recipe; with Transformer Engine there are none."""
    for module in chunk.modules():
        if isinstance(module, EmulatedLinear):
            module.rounding = ROUNDINGS[recipe]
