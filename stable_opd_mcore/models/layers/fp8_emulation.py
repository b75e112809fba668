"""Products whose operands are rounded to FP8 and back: FP8 where Transformer Engine is absent.

Values are cast to `float8_e4m3fn` or `float8_e5m2` with a recipe's scales, cast back, and
multiplied in fp32, as an FP8 GEMM accumulates. So a CPU can measure what FP8 does to a model; it is
slower than without FP8. Recipes, as Transformer Engine defines them:

    tensorwise  one scale per tensor, from its own largest magnitude; gradients in e5m2
    blockwise   e4m3 with powers of two as scales: weights in blocks of 128 x 128, inputs and
                gradients in runs of 128 along the dimension that is summed over

Shapes: T tokens, H inputs, O outputs of this rank's part of a matrix; R rows and C columns of any
operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_opd_mcore.config.training import Fp8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
# Rows and columns of a block: of what is summed over its columns, over its rows, of a weight
ALONG_COLUMNS, ALONG_ROWS, OF_WEIGHT = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """What the largest magnitude is multiplied with to become the format's largest number.

    1 where `amax` is 0 or not finite. Transformer Engine's compute_scale_from_amax
    (common/recipe/recipe_common.cuh).
    """
    scale = torch.finfo(dtype).max / amax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)  # where amax is near 0
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def block_scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale_of`, rounded down to a power of two, so nothing overflows."""
    scale = scale_of(amax, dtype)
    _, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - 1)


def _round_trip(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 x, times `scale` in FP8 and back. Larger values than FP8 has become its largest."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype).float() * scale.reciprocal()


def _tensorwise(x_RC: Tensor, dtype: torch.dtype, _block: tuple[int, int]) -> Tensor:
    """Current scaling."""
    amax = x_RC.abs().amax() if x_RC.numel() else x_RC.new_zeros(())
    return _round_trip(x_RC, scale_of(amax, dtype), dtype)


def _blockwise(x_RC: Tensor, _dtype: torch.dtype, block: tuple[int, int]) -> Tensor:
    """Always e4m3; blocks at the ends are smaller."""
    (num_rows, num_columns), (rows, columns) = x_RC.shape, block
    if not x_RC.numel():
        return x_RC
    magnitudes = F.pad(x_RC.abs(), (0, -num_columns % columns, 0, -num_rows % rows))
    amax = magnitudes.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))
    scale = block_scale_of(amax, E4M3)
    scale_RC = scale.repeat_interleave(rows, 0)[:num_rows].repeat_interleave(columns, 1)
    return _round_trip(x_RC, scale_RC[:, :num_columns], E4M3)


# A recipe's rounding of an fp32 operand, in its format and blocks, to fp32.
Rounding = Callable[[Tensor, torch.dtype, tuple[int, int]], Tensor]
ROUNDINGS: dict[Fp8Recipe, Rounding] = {"tensorwise": _tensorwise, "blockwise": _blockwise}


class _Product(torch.autograd.Function):
    """input [..., H] times weight [O, H] transposed, in the input's dtype.

    The weight's gradient sums over T and the other two products do not, so inputs and gradients are
    rounded twice.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OH: Tensor, rounding: Rounding) -> Tensor:
        input_TH = input.flatten(0, -2).float()
        rounded_OH = rounding(weight_OH.float(), E4M3, OF_WEIGHT)
        ctx.save_for_backward(rounding(input_TH, E4M3, ALONG_ROWS), rounded_OH)
        ctx.rounding, ctx.shape = rounding, input.shape
        ctx.dtypes = (input.dtype, weight_OH.dtype)
        output_TO = rounding(input_TH, E4M3, ALONG_COLUMNS) @ rounded_OH.t()
        return output_TO.to(input.dtype).view(*input.shape[:-1], weight_OH.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        input_TH, weight_OH = ctx.saved_tensors
        gradient_TO = gradients[0].flatten(0, -2).float()
        of_input = (ctx.rounding(gradient_TO, E5M2, ALONG_COLUMNS) @ weight_OH).view(ctx.shape)
        of_weight_OH = ctx.rounding(gradient_TO, E5M2, ALONG_ROWS).t() @ input_TH
        return of_input.to(ctx.dtypes[0]), of_weight_OH.to(ctx.dtypes[1]), None


def fp8_linear(input: Tensor, weight_OH: Tensor, rounding: Rounding) -> Tensor:
    """input [..., H] times weight [O, H] transposed, operands and gradients rounded: [..., O]."""
    output: Any = _Product.apply(input, weight_OH, rounding)
    return output
