"""The memory of the delayed FP8 recipe: magnitudes of earlier micro-batches, and scales from them.

It is part of a run's checkpoints, since the next step's products depend on it. It is never part of
a model's weights: an export, a server or another recipe has no use for it.

DelayedScales is that memory for emulated layers (fp8_emulation.py) and follows Transformer Engine
(transformer_engine/pytorch/quantization.py): a pass over a micro-batch uses the scales from before
it, and notes its magnitudes; after the pass they are reduced over tensor, context and data ranks
and the scales are set. `scales_of` reads either engine's memory in one form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.models.fp8 import AMAX_HISTORY


def scale_of(amax: Tensor, dtype: torch.dtype, otherwise: Tensor | float = 1.0) -> Tensor:
    """What the largest magnitude is multiplied with to become the format's largest number.

    `otherwise` where `amax` is 0 or not finite. Transformer Engine's compute_scale_from_amax
    (common/recipe/recipe_common.cuh).
    """
    scale = torch.finfo(dtype).max / amax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)  # of an amax near 0
    return torch.where((amax > 0) & amax.isfinite(), scale, otherwise)


class _Window:
    """Largest magnitudes of n tensors in earlier passes, and their scales.

    Row 0 of the history is the present pass; the others are earlier ones, the oldest first.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device):
        self.history = torch.zeros(AMAX_HISTORY, count, device=device)
        self.scale = torch.ones(count, device=device)
        self._dtype = dtype

    def note(self, columns: slice, amaxes: Tensor) -> None:
        present = self.history[0, columns]
        present.copy_(torch.maximum(present, amaxes))

    def update(self, group: dist.ProcessGroup) -> None:
        """End a pass: reduce its magnitudes over the ranks, set the scales, begin another row."""
        if group.size() > 1:
            dist.all_reduce(self.history[0], op=dist.ReduceOp.MAX, group=group)
        # A new tensor: passes that may be computed again keep the old one.
        self.scale = scale_of(self.history.amax(dim=0), self._dtype, otherwise=self.scale)
        self.history.copy_(self.history.roll(-1, dims=0))
        self.history[0].zero_()


class DelayedScales:
    """Scales of the emulated layers of one model chunk.

    Args:
        num_layers: emulated linear layers; each has an input, a weight and an output's gradient.
        group: the ranks over which magnitudes are reduced.
    """

    def __init__(self, num_layers: int, group: dist.ProcessGroup, device: torch.device):
        self._group = group
        self._forward = _Window(2 * num_layers, torch.float8_e4m3fn, device)
        self._backward = _Window(num_layers, torch.float8_e5m2, device)
        self._recomputed: Tensor | None = None  # scales of the pass that backward computes again
        self._has_gradients = False  # noted and not yet in the scales

    def forward(self, layer: int, amaxes: Tensor) -> Tensor:
        """Scales [2] of a layer's input and weight, and note their magnitudes [2].

        Recomputed activations take the scales of the first time and note nothing.
        """
        columns = slice(2 * layer, 2 * layer + 2)
        if self._recomputed is not None:
            return self._recomputed[columns]
        self._forward.note(columns, amaxes)
        return self._forward.scale[columns]

    def backward(self, layer: int, amax: Tensor) -> Tensor:
        """The scale of the gradient of a layer's output, and note its magnitude."""
        self._backward.note(slice(layer, layer + 1), amax)
        return self._backward.scale[layer]

    def begin(self) -> None:
        """Before a chunk's forward pass."""
        self._recomputed = None

    def end(self, output: Tensor) -> Tensor:
        """After a chunk's forward pass that is to be differentiated, with its output.

        The gradients' scales are set when the next pass needs them.
        """
        used = self._forward.scale
        self._forward.update(self._group)
        output_again: Any = _BeforeBackward.apply(output, self, used)
        return output_again

    def begin_backward(self, used: Tensor) -> None:
        self.settle()
        self._recomputed, self._has_gradients = used, True

    def settle(self) -> None:
        """Set the gradients' scales from the last backward pass, unless that is done already.

        Collective over the group: all of its ranks have run equally many passes.
        """
        if self._has_gradients:
            self._backward.update(self._group)
            self._has_gradients = False

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Views of a layer's memory, for `scales_of`."""
        both, one = slice(2 * layer, 2 * layer + 2), slice(layer, layer + 1)
        return {
            "forward_history": self._forward.history[:, both],
            "forward_scale": self._forward.scale[both],
            "backward_history": self._backward.history[:, one],
            "backward_scale": self._backward.scale[one],
        }


class _BeforeBackward(torch.autograd.Function):
    """The identity; tells the chunk's scales that its backward pass begins."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, scales: DelayedScales, used: Tensor) -> Tensor:
        ctx.scales, ctx.used = scales, used
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        ctx.scales.begin_backward(ctx.used)
        return gradients[0], None, None


def scales_of(chunk: Any) -> dict[str, Tensor]:
    """The delayed recipe's memory in a chunk of the student; empty with another recipe.

    Returns:
        `layer.<number from 0>.<linear layer>.<name>` -> fp32, of which the caller may change the
        values. `forward_*` are of input and weight, `backward_*` of the output's gradient:
        `*_history` [AMAX_HISTORY, 2 or 1], `*_scale` [2 or 1]. With Transformer Engine too.
    """
    scales: DelayedScales | None = chunk.fp8_scales
    if scales is not None:
        scales.settle()
    elif chunk.config.fp8 is None or chunk.config.fp8_recipe != "delayed":
        return {}
    found: dict[str, Tensor] = {}
    for layer in chunk.decoder.layers:
        for name, module in layer.named_modules():
            if scales is not None:
                index = getattr(getattr(module, "rounding", None), "layer", None)
                values = {} if index is None else scales.of_layer(index)
            else:
                values = _of_transformer_engine(module, chunk.config)
            prefix = f"layer.{layer.layer_number - 1}.{name}"
            found |= {f"{prefix}.{key}": value for key, value in values.items()}
    return found


@torch.no_grad()  # with gradients, leaving the context would count as the end of a pass
def _of_transformer_engine(module: Any, config: Any) -> dict[str, Tensor]:
    if not hasattr(module, "init_fp8_metadata"):
        return {}
    with fp8_utils.get_fp8_context(config):  # before the first pass there is no memory yet
        module.init_fp8_metadata()
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    return {  # the other columns are of an output and an input's gradient in FP8, which are unused
        "forward_history": forward.amax_history[:, :2],
        "forward_scale": forward.scale[:2],
        "backward_history": backward.amax_history[:, :1],
        "backward_scale": backward.scale[:1],
    }


def sharded_scales(chunks: Sequence[Module]) -> dict[str, ShardedTensor]:
    """A copy of the memory of this rank's chunks, as Megatron saves and loads it.

    All ranks that hold a layer have the same values.
    """
    found: dict[str, ShardedTensor] = {}
    for chunk in chunks:
        groups: Any = chunk.pg_collection
        replica = (0, groups.tp.rank(), groups.dp_cp.rank())
        for name, value in scales_of(chunk).items():
            key = f"fp8.{name}"
            found[name] = ShardedTensor.from_rank_offsets(key, value.clone(), replica_id=replica)
    return found


def set_scales(chunks: Sequence[Module], loaded: dict[str, Tensor]) -> None:
    """Copy what `dist_checkpointing.load` gave for `sharded_scales` into the chunks."""
    for chunk in chunks:
        for name, value in scales_of(chunk).items():
            value.copy_(loaded[name])
