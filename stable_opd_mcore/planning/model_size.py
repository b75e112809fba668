"""Parameters, saved activations and floating-point operations of one model on one rank.

Parameter counts are exact. Saved activations follow Transformer Engine's layers (fused norm and
rotary embedding, flash attention); layers="torch" follows the torch layers of a CPU run, without
context parallelism, whose torch form keeps a mask of [slice, sequence] and is for tests only.

H hidden, Q query width (heads x head size), K key-value width, F feed-forward width, V vocabulary
rows of the stored embedding, t tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.planning.layout import Layout

Layers = Literal["transformer_engine", "torch"]


@dataclass(frozen=True)
class ModelSize:
    """One model on one layout. Counts are per rank unless they say otherwise."""

    architecture: Architecture
    layout: Layout

    @property
    def layers_per_stage(self) -> int:
        return self.architecture.num_layers // self.layout.pipeline

    @property
    def query_width(self) -> int:
        return self.architecture.num_attention_heads * self.architecture.head_dim

    @property
    def key_width(self) -> int:
        return self.architecture.num_key_value_heads * self.architecture.head_dim

    @property
    def head_rows(self) -> int:
        """Vocabulary rows of one tensor rank, padded to equal shards."""
        return -(-self.architecture.vocab_size // self.layout.tensor)

    def layer_parameters(self) -> int:
        """Of one decoder layer: attention, SwiGLU, norms."""
        model, t = self.architecture, self.layout.tensor
        hidden, ffn = model.hidden_size, model.ffn_hidden_size // t
        qkv_rows = (self.query_width + 2 * self.key_width) // t
        attention = qkv_rows * hidden + hidden * (self.query_width // t)
        if model.family.qkv_bias:
            attention += qkv_rows
        if model.family.qk_norm:
            attention += 2 * model.head_dim
        return attention + 3 * ffn * hidden + 2 * hidden

    def stage_parameters(self, stage: int) -> int:
        """Of one pipeline stage: 0 holds the embedding, the last the final norm and the head."""
        model, last = self.architecture, self.layout.pipeline - 1
        count = self.layers_per_stage * self.layer_parameters()
        matrix = self.head_rows * model.hidden_size
        if stage == 0:
            count += matrix
        if stage == last:
            count += model.hidden_size
            if not model.tied or last > 0:  # a tied head on its own stage is a copy
                count += matrix
        return count

    def total_parameters(self) -> int:
        """Of the whole model, embedding and head included."""
        model = self.architecture
        one = ModelSize(model, Layout(1))
        return one.stage_parameters(0)

    def saved_bytes(self, recompute: str, layers: Layers, element_bytes: int) -> float:
        """Saved for backward by one layer, per token of this rank's slice of a micro-batch."""
        model, t = self.architecture, self.layout.tensor
        hidden = model.hidden_size / self._norm_ranks
        if recompute == "full":
            return element_bytes * hidden
        queries, keys = self.query_width / t, self.key_width / t
        ffn = model.ffn_hidden_size / t
        norms = 2 * self._norm_bytes(hidden, 1 / self._norm_ranks, layers, element_bytes)
        if layers == "transformer_engine":
            # Rotated queries and keys, values, output; gate and up, their product.
            elements = 2 * queries + 2 * keys + 3 * ffn
        else:
            # The values are a view that keeps all of q, k and v; the gate's activation stays, too.
            elements = 3 * queries + 3 * keys + 5 * ffn
        saved = element_bytes * elements + norms
        if recompute == "selective":  # the MLP, from the input of Transformer Engine's fused norm
            saved -= element_bytes * (3 if layers == "transformer_engine" else 5) * ffn
            if layers == "transformer_engine":
                saved -= element_bytes * hidden + 4 / self._norm_ranks
        if model.family.qk_norm:
            heads = (model.num_attention_heads + model.num_key_value_heads) / t
            saved += self._norm_bytes(queries + keys, heads, layers, element_bytes)
            saved -= element_bytes * (queries + keys)  # their outputs are not kept
        return saved + 4 * model.num_attention_heads / t  # log-sums of the attention

    def saved_outside_layers(self, last: bool, layers: Layers, element_bytes: int) -> float:
        """As saved_bytes: the stage's ids and rotary angles, and the last stage's final norm."""
        inputs = 9 + element_bytes * self.architecture.head_dim
        if not last:
            return inputs
        width = self.architecture.hidden_size / self._norm_ranks
        norm = self._norm_bytes(width, 1 / self._norm_ranks, layers, element_bytes)
        return inputs + norm - element_bytes * width  # the loss keeps the output instead

    @property
    def _norm_ranks(self) -> int:
        """Ranks over which sequence parallelism cuts norms and the residual stream."""
        return self.layout.tensor if self.layout.sequence else 1

    def _norm_bytes(self, width: float, rows: float, layers: Layers, element_bytes: int) -> float:
        """RMSNorm: input and output; torch's also keeps an fp32 copy of both sides."""
        if layers == "transformer_engine":
            return 2 * element_bytes * width + 4 * rows
        return (8 + element_bytes) * width + 4 * rows

    def forward_flops(self, tokens: float, mean_context: float) -> float:
        """Of the whole model over all its ranks, head excluded; causal attention."""
        model = self.architecture
        attention = 2 * self.query_width * mean_context
        return 2 * model.num_layers * tokens * (model.layer_products + attention)

    def mlp_share(self) -> float:
        """The MLPs' share of a layer's products, attention scores excluded."""
        model = self.architecture
        return 3 * model.ffn_hidden_size * model.hidden_size / model.layer_products

    def head_flops(self, rows: float) -> float:
        """One product of hidden states with the whole output head."""
        return 2 * rows * self.architecture.hidden_size * self.architecture.vocab_size

    def kv_bytes(self, element_bytes: int = 2) -> float:
        """Key-value cache of one token over the whole model."""
        return 2 * self.architecture.num_layers * self.key_width * element_bytes
