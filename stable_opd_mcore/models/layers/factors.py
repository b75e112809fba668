"""The low-rank factors of one linear layer, and what they add to its output.

Tensor ranks cut a pair where they cut its matrix W [O, I]. If a rank has rows of W, it has all of
A, which multiplies its own tokens, and these rows of B; [T, R] is gathered in between. If it has
columns of W, it has these columns of A and all of B; [T, R] is summed in between. An expert's pair
is on the rank that holds the expert.

Which matrices of a model have factors, and what is done with all of them, is in models/lora.py.

Letters: T tokens, I inputs and O outputs of a matrix, R rank of its factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Module, Parameter, ParameterList
from torch.utils.hooks import RemovableHandle

from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, unwrap
from stable_opd_mcore.models.tensor_cuts import join_rows, pieces

Which = Literal["A", "B"]


class Factors(Module):
    """The pairs of one linear layer: one for each of the HF matrices that it joins."""

    hook: RemovableHandle  # what adds them to the layer's output

    def __init__(
        self,
        model: HiddenStatesGPTModel,
        weight: Tensor,
        entry: tensors.Parameter,
        rank: int,
        alpha: float,
    ) -> None:
        super().__init__()
        self.entry, self.rank, self.alpha = entry, rank, alpha
        self.scale = alpha / rank
        self.is_on = True
        self._architecture = model.architecture
        self.group = model.pg_collection.tp
        self.num_parts = 1 if entry.is_expert else self.group.size()
        self.cuts_columns = entry.layout == "columns"
        # rollout/inference.py switches it off while it samples.
        self.sequence_parallel = self.num_parts > 1 and model.config.sequence_parallel
        like = {"dtype": weight.dtype, "device": weight.device}
        self.pieces = pieces(entry, model.architecture)
        parts_of_a, parts_of_b = (self.num_parts, 1) if self.cuts_columns else (1, self.num_parts)
        self.A, self.B = ParameterList(), ParameterList()
        for name in entry.hf_names:
            inputs = tensors.hf_shape(name, model.architecture)[1]
            self.A.append(Parameter(torch.empty(rank, inputs // parts_of_a, **like)))
        for _, _, outputs in self.pieces:
            self.B.append(Parameter(torch.empty(outputs // parts_of_b, rank, **like)))
        for _, which, _, own in self.parts():
            self._mark(which, own)

    def _mark(self, which: Which, own: Any) -> None:
        """Tell Megatron which factor is a shard, for the gradient norm, and which gradient it must
        sum over the tensor ranks. An expert's gradients are summed with the experts'."""
        if self.entry.is_expert:
            set_tensor_model_parallel_attributes(own, True, 0, 1)
            own.allreduce = False
        elif (cut := self.cut_of(which)) is not None:
            set_tensor_model_parallel_attributes(own, True, cut, 1)
        elif self.num_parts > 1:
            own.sequence_parallel = self.sequence_parallel

    def cut_of(self, which: Which) -> int | None:
        """The dimension in which A or B is cut over tensor ranks; None: every rank has it whole."""
        if self.num_parts == 1 or self.cuts_columns != (which == "A"):
            return None
        return 1 if self.cuts_columns else 0

    def parts(self) -> Iterator[tuple[str, Which, slice, Tensor]]:
        """HF name of the matrix, which factor of it, the rows of a piece of the whole factor, and
        this rank's part of the piece. All pieces of a factor follow each other."""
        for name, a_RI in zip(self.entry.hf_names, self.A, strict=True):
            yield name, "A", slice(0, self.rank), a_RI
            for (of, start, rows), b_OR in zip(self.pieces, self.B, strict=True):
                if of == name:
                    yield name, "B", slice(start, start + rows), b_OR

    def _by_piece(self, of_each: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensor of the matrix to which each piece of B belongs, and the piece."""
        by_name = dict(zip(self.entry.hf_names, of_each, strict=True))
        for (name, *_), b_OR in zip(self.pieces, self.B, strict=True):
            yield by_name[name], b_OR

    def forward(self, hidden: Tensor) -> Tensor:
        """What this rank adds to the layer's output; `hidden` is what the layer multiplies."""
        low = self._of_all_ranks(F.linear(hidden, torch.cat(list(self.A))) * self.scale)
        if self.cuts_columns:
            return F.linear(low, self.B[0])
        low_of_each = low.split(self.rank, dim=-1)
        outputs = [F.linear(own, b_OR) for own, b_OR in self._by_piece(low_of_each)]
        return self._joined(outputs, dim=-1)

    def _of_all_ranks(self, low: Tensor) -> Tensor:
        """[T, R] summed over tensor ranks that have columns of W, gathered from others."""
        if self.num_parts == 1:
            return low
        if self.cuts_columns and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        if self.cuts_columns:
            return reduce_from_tensor_model_parallel_region(low, group=self.group)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(low, group=self.group)
        return copy_to_tensor_model_parallel_region(low, group=self.group)

    def added_to(self, weight: Tensor) -> Tensor:
        """This rank's shard of the merged matrices, summed in fp32. No communication."""
        pairs = self._by_piece(self.A)
        products = [self.scale * (b_OR.float() @ a_RI.float()) for a_RI, b_OR in pairs]
        return self._joined(products, dim=0).add_(weight).to(weight.dtype)

    def _joined(self, rows: Sequence[Tensor], dim: int) -> Tensor:
        return join_rows(rows, self.entry.layout, self._architecture, self.num_parts, dim)


def add_to_output(each: Sequence[Factors], linear: Module, inputs: Any, output: Any) -> Any:
    """The forward hook of a linear layer that has factors.

    Args:
        each: the factors of its only weight, or of the weight of each expert on this rank. With
            several experts the layer's inputs are the tokens, sorted by expert, and each expert's
            number of tokens.
    """
    if not each[0].is_on:
        return output
    hidden, product, bias = _multiplied_input(linear, inputs[0]), *output
    if len(each) == 1:
        return product + each[0](hidden), bias
    parts = zip(each, hidden.split(list(inputs[1])), strict=True)
    return product + torch.cat([factors(part) for factors, part in parts]), bias


def _multiplied_input(linear: Any, hidden: Tensor) -> Tensor:
    """What a linear layer multiplies: its input, or the norm of it where Transformer Engine fuses a
    norm into the layer."""
    weight: Tensor | None = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return hidden
    if getattr(linear, "zero_centered_gamma", False):
        weight = weight + 1
    return F.rms_norm(hidden, weight.shape, weight, linear.eps)


def factors_of(chunks: Sequence[Module]) -> list[Factors]:
    """The factors of this rank's chunks; none where all weights are trained."""
    return [cast(Factors, each) for chunk in chunks for each in unwrap(chunk).factors]
