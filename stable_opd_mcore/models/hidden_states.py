"""The model chunk that the trainer runs, from packed tokens to hidden states, and the output head.

losses/ multiplies the two block by block, so logits of a whole micro-batch never exist.

Suffixes of names: records.py; V rows of the head's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import ModuleList

from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.layers.attention import PackedSequences
from stable_opd_mcore.models.layers.gated_delta_net import has_kernels
from stable_opd_mcore.models.layers.path_attention import PathSequences
from stable_opd_mcore.models.layers.rotary import RotaryByPosition
from stable_opd_mcore.models.spec import transformer_engine_is_usable
from stable_opd_mcore.records import MicroBatch


class FactorList(ModuleList):
    """A list of `factors.Factors`, which checkpoints hold without the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.form: dict[str, Any] = {}  # settings of student.lora; empty: it has no factors

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class HiddenStatesGPTModel(GPTModel):
    """GPTModel whose last stage returns normalised hidden states [s, b, H] instead of logits.

    Under sequence parallelism the hidden states are gathered over the tensor ranks. The loss sums
    their gradient over the vocabulary shards: it arrives complete on every rank, and the backward
    pass splits it without summing.
    """

    architecture: Architecture
    rotary_pos_emb: Any  # RotaryByPosition, or Megatron's with Transformer Engine
    token_multiple: int = 1  # divides each rank's tokens; 16 with layers in FP8
    factors: FactorList  # low-rank factors of the matrices (lora.py); empty: weights are trained

    @property
    def _by_position(self) -> bool:
        return isinstance(self.rotary_pos_emb, RotaryByPosition)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """[b, s] ids and positions in; other arguments are GPTModel's."""
        if self._by_position:
            self.rotary_pos_emb.positions = position_ids
        try:
            return super().forward(input_ids, position_ids, attention_mask, **options)  # pyright: ignore
        finally:
            if self._by_position:  # the micro-batch's tensor would be offloaded with the model
                self.rotary_pos_emb.positions = None

    def _preprocess(self, *inputs: Any, packed_seq_params: Any = None, **options: Any) -> Any:  # pyright: ignore
        found: Any = super()._preprocess(*inputs, packed_seq_params=packed_seq_params, **options)
        if not isinstance(packed_seq_params, PathSequences) or self._by_position:
            return found
        embedded, by_position, *rest = found
        return embedded, packed_seq_params.rotations(by_position), *rest

    def _postprocess(self, hidden_states: Tensor, **unused: Any) -> Tensor:  # pyright: ignore
        if self.post_process and self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states


def unwrap(chunk: torch.nn.Module) -> HiddenStatesGPTModel:
    """The chunk inside any wrappers (data parallelism)."""
    return cast(HiddenStatesGPTModel, unwrap_model(chunk))


def output_head(chunks: Sequence[torch.nn.Module], vocab_size: int | None = None) -> Head | None:
    """This tensor rank's shard of the head, the parameter itself; None before the last stage.

    vocab_size: rows of the head beyond it are padding; None: the architecture's.
    """
    last = unwrap(chunks[-1])
    if not last.post_process:
        return None
    weight_VH = last.output_layer.weight
    if weight_VH is None:  # tied, and this chunk holds the embedding
        weight_VH = last.embedding.word_embeddings.weight
    group = last.pg_collection.tp
    return Head(
        weight_VH=weight_VH,
        vocab_start=group.rank() * weight_VH.shape[0],
        vocab_size=vocab_size or last.architecture.vocab_size,
        group=group if group.size() > 1 else None,
    )


def forward_hidden(chunk: torch.nn.Module, microbatch: MicroBatch) -> Tensor:
    """Run one chunk (wrapped for data parallelism or not) over packed sequences.

    On the last stage hidden_TH, complete on every tensor rank; else the tensor for the next stage.

    Raises:
        ValueError: packing has not padded T to a multiple of the sequence-parallel ranks, times 16
            with layers in FP8.
    """
    model = unwrap(chunk)
    ranks = model.pg_collection.tp.size() if model.config.sequence_parallel else 1
    num_tokens, multiple = microbatch.tokens_T.numel(), ranks * model.token_multiple
    if num_tokens % multiple:
        raise ValueError(
            f"a micro-batch of {num_tokens} tokens cannot be cut over {ranks} sequence-parallel "
            f"ranks: pad it to a multiple of {multiple} (World.token_multiple)"
        )
    output = chunk(
        input_ids=microbatch.tokens_T[None],
        position_ids=microbatch.positions_T[None],
        attention_mask=None,
        packed_seq_params=_packed_sequences(microbatch, model),
    )
    return output.squeeze(1) if model.post_process else output


def _packed_sequences(microbatch: MicroBatch, model: HiddenStatesGPTModel) -> PackedSeqParams:
    group = model.pg_collection.cp
    described: Any = {
        "qkv_format": "thd",
        "cu_seqlens_q": microbatch.cu_seqlens,
        "cu_seqlens_kv": microbatch.cu_seqlens,
        "max_seqlen_q": microbatch.max_seqlen,
        "max_seqlen_kv": microbatch.max_seqlen,
    }
    # A gated delta net in plain torch needs rectangles, also with Transformer Engine's attention.
    has_rectangles = model.architecture.delta_net is not None and not has_kernels()
    if has_rectangles or not transformer_engine_is_usable():
        return PackedSequences.of(
            microbatch.cu_seqlens,
            microbatch.positions_T,
            group,
            microbatch.key_places_K,
            microbatch.cu_seqlens_keys,
            **described,
        )
    if microbatch.key_places_K is not None:
        return PathSequences.of(microbatch, **described)
    if group.size() > 1:  # Transformer Engine needs both; here a sequence's end includes padding
        described["cu_seqlens_q_padded"] = described["cu_seqlens_kv_padded"] = microbatch.cu_seqlens
    return PackedSeqParams(**described)
