"""What a rank holds for a moment while it computes one layer, next to what is saved for backward.

Forward passes of scorers save nothing, so a layer's tensors are freed as soon as they are read. In
the backward pass gradients stand next to the saved tensors that they are computed from. Each
function takes the largest of the moments in which most is held. These follow from what each
operation of Transformer Engine's layers reads and writes; its own workspaces are not counted. Not
here: saved tensors (model_size.py), the loss (memory.py).

Per token, in elements: H hidden, h hidden over the sequence-parallel ranks, F feed-forward width
over the tensor ranks, C copies of a token at this rank's experts.
"""

from stable_opd_mcore.planning.model_size import ModelSize


def forward_bytes(size: ModelSize, tokens: float) -> float:
    """Largest sum of one layer's tensors in a pass without gradients over `tokens` tokens."""
    # The embeddings, which the model holds to its end, the layer's input and the attention's output
    streams = 3 * size.local_hidden
    if size.architecture.experts is not None:
        outputs = size.expert_copies() * size.architecture.hidden_size
        return size.element * tokens * (streams + _dispatched(size) + outputs)
    ffn = size.architecture.ffn_hidden_size / size.layout.tensor
    moments = 2 * ffn + _gathered(size), 3 * ffn  # gate and up; then their product as well
    return size.element * tokens * (streams + max(moments))


def backward_bytes(size: ModelSize, recompute: str, tokens: float) -> float:
    """Largest sum of what the backward pass of the last layer holds next to all saved tensors."""
    held = _recomputed_bytes(size, recompute) + size.element * size.local_hidden
    if size.architecture.experts is not None:
        # In the layer's own forward pass, when the experts' outputs are put in order: the saved
        # inputs of the experts, what was sent, received and computed, and the residual.
        return tokens * (held + size.element * (_dispatched(size) + size.local_hidden))
    ffn = size.architecture.ffn_hidden_size / size.layout.tensor
    # The product's gradient is read, those of gate and up are written; the product is freed.
    return tokens * (held + size.element * max(ffn + _gathered(size), 2 * ffn))


def _recomputed_bytes(size: ModelSize, recompute: str) -> float:
    """Per token: what one layer saves when it is computed again, and that pass's output."""
    if recompute == "none":
        return 0
    again = size.saved_bytes("none") - size.saved_bytes(recompute)
    return again + size.element * size.local_hidden


def _dispatched(size: ModelSize) -> float:
    """Elements per token of an experts' layer: copies sent, received, computed and in order."""
    return 4 * size.expert_copies() * size.architecture.hidden_size


def _gathered(size: ModelSize) -> int:
    """Elements per token of a linear layer's input that sequence parallelism gathers."""
    return size.architecture.hidden_size if size.layout.sequence else 0
