"""The low-rank factors of one linear layer, and what they add to its output.

Tensor ranks cut a pair where they cut its matrix W [O, I]. If a rank has rows of W, it has all of
A, which multiplies its own tokens, and these rows of B; [T, R] is gathered in between. If it has
columns of W, it has these columns of A and all of B; [T, R] is summed in between. A rank that has
all of W has all of both. An expert's pair is on the rank that holds the expert.

Which matrices of a model have factors, and what is done with all of them, is in models/lora.py.

Letters: T tokens, I inputs and O outputs of a matrix, R rank of its factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The pairs of one linear layer: one for each of `names`, which are some or all of the HF
    matrices that it joins."""

    hook: RemovableHandle  # what adds them to the layer's output

    def __init__(
        self,
        model: HiddenStatesGPTModel,
        weight: Tensor,
        entry: tensors.Parameter,
        names: Sequence[str],
        *,
        rank: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.entry, self.names, self.rank, self.scale = entry, names, rank, scale
        self.is_on = True
        self._architecture = model.architecture
        self.group = model.pg_collection.tp
        is_whole = entry.is_expert or entry.layout == "replicated"
        self.num_parts = 1 if is_whole else self.group.size()
        self.cuts_columns = entry.layout == "columns"
        self._sums_tokens: bool = model.config.sequence_parallel
        # rollout/inference.py switches it off while it samples.
        self.sequence_parallel = self.num_parts > 1 and model.config.sequence_parallel
        like = {"dtype": weight.dtype, "device": weight.device}
        self.pieces = pieces(entry, model.architecture)
        parts_of_a, parts_of_b = (self.num_parts, 1) if self.cuts_columns else (1, self.num_parts)
        self.A, self.B = ParameterList(), ParameterList()
        for name in names:
            inputs = tensors.hf_shape(name, model.architecture)[1]
            self.A.append(Parameter(torch.empty(rank, inputs // parts_of_a, **like)))
        for name, _, outputs in self.pieces:
            if name in names:
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
        elif self.num_parts > 1 or self.entry.layout == "replicated":
            own.sequence_parallel = self._sums_tokens

    def cut_of(self, which: Which) -> int | None:
        """The dimension in which A or B is cut over tensor ranks; None: every rank has it whole."""
        if self.num_parts == 1 or self.cuts_columns != (which == "A"):
            return None
        return 1 if self.cuts_columns else 0

    def parts(self) -> Iterator[tuple[str, Which, slice, Tensor]]:
        """HF name of the matrix, which factor of it, the rows of a piece of the whole factor, and
        this rank's part of the piece. All pieces of a factor follow each other."""
        pieces = [piece for piece in self.pieces if piece[0] in self.names]
        for name, a_RI in zip(self.names, self.A, strict=True):
            yield name, "A", slice(0, self.rank), a_RI
            for (of, start, rows), b_OR in zip(pieces, self.B, strict=True):
                if of == name:
                    yield name, "B", slice(start, start + rows), b_OR

    def _by_piece(
        self,
        of_each: Iterable[Tensor],
        product: Callable[[Tensor, Tensor], Tensor],
        zeros: Callable[[int], Tensor],
    ) -> list[Tensor]:
        """The product of each piece of B with the tensor of its matrix; zeros for as many rows
        where the matrix has no pair."""
        by_name, own = dict(zip(self.names, of_each, strict=True)), iter(self.B)
        share = 1 if self.cuts_columns else self.num_parts
        return [
            product(by_name[name], next(own)) if name in by_name else zeros(rows // share)
            for name, _, rows in self.pieces
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """What this rank adds to the layer's output; `hidden` is what the layer multiplies."""
        low = self._of_all_ranks(F.linear(hidden, torch.cat(list(self.A))) * self.scale)
        if self.cuts_columns:
            return F.linear(low, self.B[0])
        outputs = self._by_piece(
            low.split(self.rank, dim=-1),
            lambda own, b_OR: F.linear(own, b_OR),
            lambda rows: low.new_zeros(*low.shape[:-1], rows),
        )
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
        products = self._by_piece(
            self.A,
            lambda a_RI, b_OR: self.scale * (b_OR.float() @ a_RI.float()),
            lambda rows: weight.new_zeros(rows, weight.shape[1], dtype=torch.float32),
        )
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
