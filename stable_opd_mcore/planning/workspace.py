"""What a rank holds for a moment while it computes one layer, beside what is saved for backward.

Forward passes of scorers save nothing, so a layer's tensors are freed as soon as they are read. In
the backward pass gradients stand beside the saved tensors that they are computed from. Each
function takes the largest of the moments in which most is held. For torch's layers these moments
were seen in the fake world of `stable-opd rehearse`. For Transformer Engine's layers they follow
from what each operation reads and writes; its own workspaces are not counted. Not here: saved
tensors (model_size.py), the loss (memory.py).

Per token, in elements: H hidden, h hidden over the sequence-parallel ranks, F feed-forward width
over the tensor ranks, C copies of a token at this rank's experts.
"""

from stable_opd_mcore.planning.model_size import ModelSize


def forward_bytes(size: ModelSize, tokens: float) -> float:
    """Largest sum of one layer's tensors in a pass without gradients over `tokens` tokens."""
    # The embeddings, which the model holds to its end, the layer's input and the attention's
    # output. Transformer Engine's fused norm frees its output; torch's stays to the MLP's end.
    streams = (4 if size.is_torch else 3) * size.local_hidden
    if size.architecture.experts is not None:
        outputs = size.expert_copies() * size.architecture.hidden_size
        return size.element * tokens * (streams + _dispatched(size) + outputs)
    ffn = size.architecture.ffn_hidden_size / size.layout.tensor
    # Gate and up; then beside them the gate's activation, torch's copy of up, and their product.
    moments = 2 * ffn + _gathered(size), (5 if size.is_torch else 3) * ffn
    return size.element * tokens * (streams + max(moments))


def backward_bytes(size: ModelSize, recompute: str, tokens: float) -> float:
    """Largest sum of what the backward pass of the last layer holds beside all saved tensors."""
    held = _recomputed_bytes(size, recompute) + size.element * size.local_hidden
    return tokens * held + max(_moments(size, tokens))


def gathered_input_bytes(size: ModelSize, tokens: float) -> float:
    """Megatron's buffer for a linear layer's input under sequence parallelism: kept for good.

    Transformer Engine gathers into new memory and frees it.
    """
    return size.element * tokens * _gathered(size) if size.is_torch else 0


def _recomputed_bytes(size: ModelSize, recompute: str) -> float:
    """Per token: what one layer saves when it is computed again, and that pass's output."""
    if recompute == "none":
        return 0
    again = size.saved_bytes("none") - size.saved_bytes(recompute)
    output = size.element * size.local_hidden
    # Torch's norm saves its input in fp32, so the layer's saved input is not among its tensors.
    own_input = output if recompute == "full" and size.is_torch else 0
    return again + output + own_input


def _moments(size: ModelSize, tokens: float) -> tuple[float, ...]:
    """Bytes beside saved tensors and the gradient of the layer's output."""
    element, local = size.element, size.local_hidden
    if size.architecture.experts is not None:
        # In the layer's own forward pass, when the experts' outputs are put in order: beside the
        # saved inputs of the experts what was sent, received and computed. And the residual.
        return (element * tokens * (_dispatched(size) + local),)
    ffn = size.architecture.ffn_hidden_size / size.layout.tensor
    # Torch makes the gradient of the down projection's weight before it adds it to the sum.
    weight = element * ffn * size.architecture.hidden_size if size.is_torch else 0
    product = element * tokens * (ffn + _gathered(size)) + weight
    # The product's gradient is read, those of gate and up are written; the product is freed.
    gate_and_up = element * tokens * 2 * ffn
    if not size.is_torch:
        return product, gate_and_up
    # The norm before the MLP, in fp32, when all that the MLP saved is freed.
    return product, gate_and_up, tokens * (3.5 * 4 * local - size.mlp_bytes())


def _dispatched(size: ModelSize) -> float:
    """Elements per token of an experts' layer: copies sent, received, computed and in order."""
    return 4 * size.expert_copies() * size.architecture.hidden_size


def _gathered(size: ModelSize) -> int:
    """Elements per token of a linear layer's input that sequence parallelism gathers."""
    return size.architecture.hidden_size if size.layout.sequence else 0
