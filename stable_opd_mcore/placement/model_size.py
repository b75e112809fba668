"""Parameters, activations and floating-point operations of one model on one rank.

Parameter counts are exact. Saved activations follow Transformer Engine's layers (fused norm and
rotary embedding, flash attention), not the torch layers of a CPU run, which keep more.

A mixture of experts is counted as if every expert were chosen equally often.

H hidden, Q query width (heads x head size), K key-value width, F feed-forward width, V vocabulary
rows of the stored embedding, t tensor ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.adapted import chosen
from stable_opd_mcore.models.tensors import Parameter, hf_shape, is_in_fp8, layer_parameters
from stable_opd_mcore.placement.layout import Layout

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

    @property
    def norms_per_layer(self) -> int:
        """Norms of the residual stream, and of what is added to it, in one layer."""
        return 4 if self.architecture.family.norms_after else 2

    def layers(self, stage: int) -> list[int]:
        """Indices, from 0, of the layers of a stage."""
        chunk = self.layers_per_stage // self.layout.virtual
        numbers = range(self.architecture.num_layers)
        return [n for n in numbers if n // chunk % self.layout.pipeline == stage]

    def delta_layers(self, stage: int) -> int:
        """Layers of a stage with a gated delta net instead of attention."""
        return len(set(self.layers(stage)) & set(self.architecture.delta_layers))

    def dense_layers(self, stage: int) -> int:
        """Layers of a stage with one dense MLP in a mixture of experts."""
        return sum(n < self.architecture.num_dense_layers for n in self.layers(stage))

    def _sum(self, stage: int, count: Callable[[Parameter, int], int]) -> int:
        """The sum over all parameters of a stage's layers, of which a count knows the elements."""
        return sum(
            layers * sum(count(*each) for each in _parameters(self.architecture, number))
            for number, layers in self.architecture.kinds(self.layers(stage)).items()
        )

    def _held(self, entry: Parameter, elements: int) -> int:
        """Elements on one tensor rank; an expert is whole."""
        return elements // self.layout.tensor if entry.is_cut else elements

    def expert_parameters(self, stage: int) -> int:
        """Parameters of this rank's experts in a stage's layers; 0 in a dense model."""
        of_all = self._sum(stage, lambda entry, elements: entry.is_expert * elements)
        return of_all // self.layout.expert

    def factor_parameters(self, lora: LoraConfig, stage: int) -> int:
        """Parameters of the low-rank factors in one stage's layers, a shared expert's included,
        without those of experts."""
        return self._sum(stage, lambda entry, _: self._factors(lora, entry, of_experts=False))

    def expert_factor_parameters(self, lora: LoraConfig, stage: int) -> int:
        """Parameters of the low-rank factors of this rank's experts; 0 in a dense model."""
        of_all = self._sum(stage, lambda entry, _: self._factors(lora, entry, of_experts=True))
        return of_all // self.layout.expert

    def _factors(self, lora: LoraConfig, entry: Parameter, *, of_experts: bool) -> int:
        """Parameters of the factors of a parameter's matrices on a tensor rank. A of a matrix that
        is cut by rows, and B of one by columns, are whole."""
        model, count = self.architecture, 0
        if entry.is_expert != of_experts:
            return 0
        ranks = self.layout.tensor if entry.is_cut else 1
        for name in chosen(entry, model, lora.matrices):
            outputs, inputs = hf_shape(name, model)
            by_columns = entry.layout == "columns"
            width = inputs // ranks + outputs if by_columns else inputs + outputs // ranks
            count += lora.rank_of(of_experts) * width
        return count

    def widest_matrix(self) -> int:
        """Elements of a layer's largest matrix, joined as Megatron joins matrices."""
        model = self.architecture
        every = chain.from_iterable(_parameters(model, n) for n in model.kinds())
        return max(self._held(*each) for each in every)

    def fp8_parameters(self, stage: int) -> int:
        """Parameters of the matrices in FP8 on one pipeline stage."""
        model = self.architecture

        def held(entry: Parameter, elements: int) -> int:
            return (not entry.is_expert and is_in_fp8(entry, model)) * self._held(entry, elements)

        return self._sum(stage, held) + self.expert_parameters(stage)

    def stage_parameters(self, stage: int) -> int:
        """Parameters of one pipeline stage: 0 has the embedding, the last norm and head."""
        return self.shared_parameters(stage) + self.expert_parameters(stage)

    def shared_parameters(self, stage: int) -> int:
        """Parameters of one pipeline stage without its experts."""
        model, last = self.architecture, self.layout.pipeline - 1
        count = self._sum(stage, lambda entry, n: (not entry.is_expert) * self._held(entry, n))
        matrix = self.head_rows * model.hidden_size
        if stage == 0:
            count += matrix
        if stage == last:
            count += model.hidden_size
            if not model.tied or last > 0:  # a tied head on its own stage is a copy
                count += matrix
        return count

    def total_parameters(self) -> int:
        """Parameters of the whole model, with embedding and head."""
        return ModelSize(self.architecture, Layout(1)).stage_parameters(0)

    def read_parameters(self, tokens: float) -> float:
        """Parameters of the whole model that `tokens` tokens read: all but unchosen experts."""
        one = ModelSize(self.architecture, Layout(1))
        experts = self.architecture.experts
        if experts is None:
            return one.stage_parameters(0)
        unchosen = (1 - experts.per_token / experts.number) ** tokens
        return one.shared_parameters(0) + one.expert_parameters(0) * (1 - unchosen)

    def saved_by_layers(self, recompute: str, stage: int) -> float:
        """Saved for backward by a stage's layers, per token of this rank's slice of a batch."""
        delta_layers, dense_layers = self.delta_layers(stage), self.dense_layers(stage)
        others = self.layers_per_stage - delta_layers - dense_layers
        saved = others * self.saved_bytes(recompute)
        if delta_layers:
            saved += delta_layers * self.saved_bytes(recompute, delta=True)
        if dense_layers:
            saved += dense_layers * self.saved_bytes(recompute, dense=True)
        return saved

    def saved_bytes(self, recompute: str, *, delta: bool = False, dense: bool = False) -> float:
        """Saved for backward by one layer, per token of this rank's slice of a micro-batch.

        Args:
            delta: the layer has a gated delta net instead of attention.
            dense: it has a dense MLP in a mixture of experts.
        """
        model, t, hidden = self.architecture, self.layout.tensor, self.local_hidden
        if recompute == "full":
            return self.element * hidden
        queries, keys = self.query_width / t, self.key_width / t
        mlp = self.mlp_bytes(dense=dense)
        norms = 2 * self._norm_bytes(hidden, 1 / self.norm_ranks)
        # The output of a norm after attention or MLP is only added.
        after = self.norms_per_layer - 2
        norms += after * (self.element * hidden + 4 / self.norm_ranks)
        # Rotated queries and keys, values, output
        mixer = self.element * 2 * (queries + keys)
        if delta:
            mixer = self._delta_net_bytes()
        elif model.latent is not None:
            mixer = self._latent_bytes()
        elif model.family.gated_attention:
            mixer += self.element * 2 * queries  # gates, and the product
        saved = mixer + norms + mlp
        if recompute == "selective":  # the MLP, from the input of Transformer Engine's fused norm
            saved -= mlp
            if model.experts is None or dense:
                saved -= self.element * hidden + 4 / self.norm_ranks
        if delta:
            return saved
        if model.family.qk_norm:
            heads = (model.num_attention_heads + model.num_key_value_heads) / t
            saved += self._norm_bytes(queries + keys, heads)
            saved -= self.element * (queries + keys)  # their outputs are not kept
        return saved + 4 * model.num_attention_heads / t  # log-sums of the attention

    def _latent_bytes(self) -> float:
        """Saved by a latent attention per token: queries, keys, values and output of all heads, and
        the latents before and after their norms."""
        model, latent = self.architecture, self.architecture.latent
        assert latent is not None
        heads = 2 * model.num_attention_heads * (model.head_dim + latent.value_dim)
        narrow = 2 * (latent.rank + (latent.query_rank or 0)) + latent.rotated_dim
        kept = heads / self.layout.tensor + narrow / self.norm_ranks
        return self.element * kept + 8 / self.norm_ranks

    def _delta_net_bytes(self) -> float:
        """Saved by a gated delta net's kernels per token. The inputs of convolution and recurrence,
        the gates and the outputs are in the model's precision; decay, beta and a state for each 64
        tokens are in fp32."""
        net = self.architecture.delta_net
        assert net is not None
        narrow = self.element * (2 * net.channels + 3 * net.values)
        wide = 4 * net.num_value_heads * (2 + net.key_dim * net.value_dim / 64)
        return (narrow + wide) / self.layout.tensor

    def mlp_bytes(self, *, dense: bool = False) -> float:
        """Saved by one layer's MLP, or by its router and this rank's experts; `dense`: by an MLP
        among layers of experts."""
        model = self.architecture
        # Gate and up, and their product; where it has no kernel of its own, every step is kept
        widths = 4 if model.family.gelu else 3 if model.family.glu_limit is None else 8
        width = model.mlp_width if dense else model.dense_width
        of_all = self.element * widths * width / self.layout.tensor
        if model.experts is None or dense:
            return of_all
        # Input and output of the experts
        kept = widths * model.ffn_hidden_size + 2 * model.hidden_size
        # fp32: logits and probabilities of the router
        router = 2 * 4 * model.experts.number / self.norm_ranks
        shared = of_all + self.element * self._shared_output()
        return self.element * self.expert_copies() * kept + router + shared

    def expert_copies(self) -> float:
        """Tokens at this rank's experts, per token of a micro-batch; 0 in a dense model."""
        experts = self.architecture.experts
        return 0.0 if experts is None else experts.per_token / self.norm_ranks

    def saved_outside_layers(self, last: bool) -> float:
        """Saved per token outside the layers: ids, rotary angles, the last stage's final norm."""
        inputs = 9 + self.element * sum(each.size for each in self.architecture.rotaries())
        return inputs + self.final_norm_bytes() if last else inputs

    def final_norm_bytes(self) -> float:
        """Saved by the last stage's norm per token; its output is the loss's."""
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
            outputs = self.expert_copies() * self.architecture.hidden_size + self._shared_output()
            dense = 3 * self._leading_width()
            moments = self._dispatched() + outputs, self._mixed(), dense
            return self.element * tokens * (streams + max(moments))
        ffn = self.architecture.ffn_hidden_size / self.layout.tensor
        # The sum is largest at one of these moments: gate and up; then their product as well; or in
        # a gated delta net q, k, v and z, what is convolved, and the outputs.
        moments = 2 * ffn + self._gathered(), 3 * ffn, self._mixed()
        return self.element * tokens * (streams + max(moments))

    def backward_bytes(self, recompute: str, tokens: float) -> float:
        """Largest sum of what the backward pass of the last layer holds next to all saved tensors.

        It follows from what each operation reads and writes; workspaces are not counted.
        """
        held = self.element * self.local_hidden
        if recompute != "none":  # what the layer saves when it is computed again, and its output
            kinds: list[dict[str, bool]] = [{}]
            kinds += [{"delta": True}] if self.architecture.delta_layers else []
            kinds += [{"dense": True}] if self.architecture.num_dense_layers else []
            again = (
                self.saved_bytes("none", **kind) - self.saved_bytes(recompute, **kind)
                for kind in kinds
            )
            held += max(again) + held
        if self.architecture.experts is not None:
            # In the layer's own forward pass, when the experts' outputs are put in order: the saved
            # inputs of the experts, what was sent, received and computed, and the residual.
            outputs = self.local_hidden + self._shared_output()
            widest = max(self._dispatched() + outputs, 2 * self._leading_width())
            return tokens * (held + self.element * widest)
        ffn = self.architecture.ffn_hidden_size / self.layout.tensor
        # The product's gradient is read, those of gate and up are written; the product is freed.
        return tokens * (held + self.element * max(ffn + self._gathered(), 2 * ffn))

    def _leading_width(self) -> float:
        """Width on one rank of the dense MLPs of a mixture of experts; 0 without any."""
        model = self.architecture
        return model.mlp_width / self.layout.tensor if model.num_dense_layers else 0.0

    def _mixed(self) -> float:
        """Elements per token of a gated delta net: q, k, v and z, what is convolved, outputs."""
        net = self.architecture.delta_net
        return 0 if net is None else (2 * net.channels + 2 * net.values) / self.layout.tensor

    def _shared_output(self) -> float:
        """Elements per token of a shared expert's output; 0 without one."""
        has_one = self.architecture.experts is not None and self.architecture.dense_width
        return self.local_hidden if has_one else 0.0

    def _dispatched(self) -> float:
        """Elements per token of an experts' layer: copies sent, received, computed and in order."""
        return 4 * self.expert_copies() * self.architecture.hidden_size

    def _gathered(self) -> int:
        """Elements per token of a linear layer's input that sequence parallelism gathers."""
        return self.architecture.hidden_size if self.layout.sequence else 0

    def forward_flops(self, tokens: float, mean_context: float) -> float:
        """Operations of the whole model over all its ranks, without the head. Attention is causal,
        and does not exceed a sliding window."""
        model = self.architecture
        sliding = len(model.sliding_layers)
        read = (model.num_attention_layers - sliding) * mean_context
        read += sliding * min(mean_context, model.sliding_window or 0)
        return 2 * tokens * (model.products + model.score_products * read)

    def head_flops(self, rows: float) -> float:
        """One product of hidden states with the whole output head."""
        return 2 * rows * self.architecture.hidden_size * self.architecture.vocab_size

    def kv_bytes(self, element_bytes: int = 2, tensor: int = 1) -> float:
        """Cache of one token in all layers on one of `tensor` ranks: keys and values of its heads,
        or a latent and its rotated key, which every rank has."""
        model = self.architecture
        width = 2 * self.key_width / tensor
        if model.latent is not None:
            width = model.latent.rank + model.latent.rotated_dim
        return model.num_attention_layers * width * element_bytes

    def state_bytes(self, element_bytes: int = 2) -> float:
        """What a sequence of any length keeps over the whole model: the states of gated delta nets,
        and the last inputs of their convolutions."""
        net = self.architecture.delta_net
        if net is None:
            return 0.0
        state = 4 * net.values * net.key_dim
        inputs = element_bytes * (net.conv_width - 1) * net.channels
        return len(self.architecture.delta_layers) * (state + inputs)


@lru_cache(maxsize=64)
def _parameters(model: Architecture, number: int) -> list[tuple[Parameter, int]]:
    """The parameters of a layer, and how many elements each has on all ranks together."""
    return [
        (entry, sum(math.prod(hf_shape(name, model)) for name in entry.hf_names))
        for entry in layer_parameters(model, number)
    ]
