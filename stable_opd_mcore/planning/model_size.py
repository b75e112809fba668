"""Parameters, activations and floating-point operations of one model on one rank.

Parameter counts are exact. Saved activations follow Transformer Engine's layers (fused norm and
rotary embedding, flash attention), not the torch layers of a CPU run, which keep more.

A mixture of experts is counted as if every expert were chosen equally often.

H hidden, Q query width (heads x head size), K key-value width, F feed-forward width, V vocabulary
rows of the stored embedding, t tensor ranks.
"""

from dataclasses import dataclass

from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.planning.layout import Layout

# Bytes of a parameter's weight and of its Adam state: fp32 weights, which with fp32 are the
# model's own, and two moments.
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
ADAM_BYTES = {"bf16": 12, "fp32": 8}


@dataclass(frozen=True)
class ModelSize:
    """One model on one layout. Counts are per rank unless they say otherwise."""

    architecture: Architecture
    layout: Layout
    element: int = 2  # bytes of an activation

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
        """One decoder layer's without experts: attention, norms, SwiGLU or router."""
        model, t = self.architecture, self.layout.tensor
        hidden = model.hidden_size
        qkv_rows = (self.query_width + 2 * self.key_width) // t
        attention = qkv_rows * hidden + hidden * (self.query_width // t)
        if model.family.qkv_bias:
            attention += qkv_rows
        if model.family.qk_norm:
            attention += 2 * model.head_dim
        if model.experts is not None:
            return attention + model.experts.number * hidden + 2 * hidden
        return attention + 3 * model.ffn_hidden_size // t * hidden + 2 * hidden

    def expert_parameters(self) -> int:
        """This rank's experts in the layers of a stage; 0 in a dense model."""
        model = self.architecture
        if model.experts is None:
            return 0
        own = model.experts.number // self.layout.expert
        return self.layers_per_stage * own * 3 * model.ffn_hidden_size * model.hidden_size

    def factor_parameters(self, rank: int) -> int:
        """Low-rank factors of the matrices of one stage's layers, without its experts."""
        model, t, hidden = self.architecture, self.layout.tensor, self.architecture.hidden_size
        # A of a matrix that is cut by rows, and B of one that is cut by columns, are whole.
        layer = 4 * hidden + 2 * (self.query_width + self.key_width) // t
        if model.experts is None:
            layer += 3 * hidden + 3 * model.ffn_hidden_size // t
        return rank * layer * self.layers_per_stage

    def expert_factor_parameters(self, rank: int) -> int:
        """The same of this rank's experts; 0 in a dense model."""
        inputs, outputs = self.architecture.hidden_size, self.architecture.ffn_hidden_size
        return self.expert_parameters() // (inputs * outputs) * rank * (inputs + outputs)

    def widest_matrix(self) -> int:
        """Values of the largest parameter of a layer, joined as Megatron joins them."""
        model, layout = self.architecture, self.layout
        rows = (self.query_width + 2 * self.key_width) // layout.tensor
        mlp = 2 * model.ffn_hidden_size // (1 if model.experts else layout.tensor)
        return max(rows, mlp) * model.hidden_size

    def fp8_parameters(self) -> int:
        """Parameters of the matrices in FP8 on one pipeline stage."""
        model, layout = self.architecture, self.layout
        heads = 2 * (self.query_width + self.key_width) // layout.tensor
        layer = model.hidden_size * heads
        if model.experts is None:
            layer += 3 * model.ffn_hidden_size // layout.tensor * model.hidden_size
        else:
            layer += self.expert_parameters() // self.layers_per_stage
        return layer * self.layers_per_stage

    def stage_parameters(self, stage: int) -> int:
        """One pipeline stage's: 0 holds the embedding, the last the final norm and the head."""
        return self.shared_parameters(stage) + self.expert_parameters()

    def shared_parameters(self, stage: int) -> int:
        """One pipeline stage's without its experts."""
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
        """The whole model's, embedding and head included."""
        return ModelSize(self.architecture, Layout(1)).stage_parameters(0)

    def read_parameters(self, tokens: float) -> float:
        """The whole model's that some of `tokens` tokens need: all but unchosen experts."""
        one = ModelSize(self.architecture, Layout(1))
        experts = self.architecture.experts
        if experts is None:
            return one.stage_parameters(0)
        unchosen = (1 - experts.per_token / experts.number) ** tokens
        return one.shared_parameters(0) + one.expert_parameters() * (1 - unchosen)

    def saved_bytes(self, recompute: str) -> float:
        """Saved for backward by one layer, per token of this rank's slice of a micro-batch."""
        model, t, hidden = self.architecture, self.layout.tensor, self.local_hidden
        if recompute == "full":
            return self.element * hidden
        queries, keys = self.query_width / t, self.key_width / t
        mlp = self.mlp_bytes()
        norms = 2 * self._norm_bytes(hidden, 1 / self.norm_ranks)
        # Rotated queries and keys, values, output
        saved = self.element * 2 * (queries + keys) + norms + mlp
        if recompute == "selective":  # the MLP, from the input of Transformer Engine's fused norm
            saved -= mlp
            if model.experts is None:
                saved -= self.element * hidden + 4 / self.norm_ranks
        if model.family.qk_norm:
            heads = (model.num_attention_heads + model.num_key_value_heads) / t
            saved += self._norm_bytes(queries + keys, heads)
            saved -= self.element * (queries + keys)  # their outputs are not kept
        return saved + 4 * model.num_attention_heads / t  # log-sums of the attention

    def mlp_bytes(self) -> float:
        """Saved by one layer's MLP, or by its router and this rank's experts."""
        model = self.architecture
        width = 3 * model.ffn_hidden_size  # gate and up, and their product
        experts = model.experts
        if experts is None:
            return self.element * width / self.layout.tensor
        kept = width + 2 * model.hidden_size  # input and output of the experts
        # fp32: logits and probabilities of the router
        router = 2 * 4 * experts.number / self.norm_ranks
        return self.element * self.expert_copies() * kept + router

    def expert_copies(self) -> float:
        """Tokens at this rank's experts, per token of a micro-batch; 0 in a dense model."""
        experts = self.architecture.experts
        return 0.0 if experts is None else experts.per_token / self.norm_ranks

    def saved_outside_layers(self, last: bool) -> float:
        """Saved by the rest of a stage: ids and rotary angles, and the last stage's final norm."""
        inputs = 9 + self.element * self.architecture.head_dim
        return inputs + self.final_norm_bytes() if last else inputs

    def final_norm_bytes(self) -> float:
        """Saved by the last stage's norm per token; its output is the loss's (memory.py)."""
        norm = self._norm_bytes(self.local_hidden, 1 / self.norm_ranks)
        return norm - self.element * self.local_hidden

    @property
    def norm_ranks(self) -> int:
        """Ranks over which sequence parallelism cuts norms and the residual stream."""
        return self.layout.tensor if self.layout.sequence else 1

    @property
    def local_hidden(self) -> float:
        """Width of the residual stream on one rank."""
        return self.architecture.hidden_size / self.norm_ranks

    def _norm_bytes(self, width: float, rows: float) -> float:
        """RMSNorm: input and output, and a factor for each row in fp32."""
        return 2 * self.element * width + 4 * rows

    def forward_bytes(self, tokens: float) -> float:
        """Largest sum of one layer's tensors in a pass without gradients over `tokens` tokens."""
        # The embeddings, which stay to the end, the layer's input, the attention's output
        streams = 3 * self.local_hidden
        if self.architecture.experts is not None:
            outputs = self.expert_copies() * self.architecture.hidden_size
            return self.element * tokens * (streams + self._dispatched() + outputs)
        ffn = self.architecture.ffn_hidden_size / self.layout.tensor
        moments = 2 * ffn + self._gathered(), 3 * ffn  # gate and up; then their product as well
        return self.element * tokens * (streams + max(moments))

    def backward_bytes(self, recompute: str, tokens: float) -> float:
        """Largest sum of what the backward pass of the last layer holds next to all saved tensors.

        It follows from what each operation reads and writes; workspaces are not counted.
        """
        held = self.element * self.local_hidden
        if recompute != "none":  # what the layer saves when it is computed again, and its output
            held += self.saved_bytes("none") - self.saved_bytes(recompute) + held
        if self.architecture.experts is not None:
            # In the layer's own forward pass, when the experts' outputs are put in order: the saved
            # inputs of the experts, what was sent, received and computed, and the residual.
            return tokens * (held + self.element * (self._dispatched() + self.local_hidden))
        ffn = self.architecture.ffn_hidden_size / self.layout.tensor
        # The product's gradient is read, those of gate and up are written; the product is freed.
        return tokens * (held + self.element * max(ffn + self._gathered(), 2 * ffn))

    def _dispatched(self) -> float:
        """Elements per token of an experts' layer: copies sent, received, computed and in order."""
        return 4 * self.expert_copies() * self.architecture.hidden_size

    def _gathered(self) -> int:
        """Elements per token of a linear layer's input that sequence parallelism gathers."""
        return self.architecture.hidden_size if self.layout.sequence else 0

    def forward_flops(self, tokens: float, mean_context: float) -> float:
        """The whole model's over all its ranks, head excluded; causal attention."""
        model = self.architecture
        attention = 2 * self.query_width * mean_context
        return 2 * model.num_layers * tokens * (model.layer_products + attention)

    def head_flops(self, rows: float) -> float:
        """One product of hidden states with the whole output head."""
        return 2 * rows * self.architecture.hidden_size * self.architecture.vocab_size

    def kv_bytes(self, element_bytes: int = 2) -> float:
        """Key-value cache of one token over the whole model."""
        return 2 * self.architecture.num_layers * self.key_width * element_bytes
