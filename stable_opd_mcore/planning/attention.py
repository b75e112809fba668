"""Transformer Engine's attention under `train.deterministic`: which kernels it takes, and memory.

The rule is Transformer Engine 2.20.2's (pytorch/attention/dot_product_attention/utils.py, "Filter:
Determinism") for packed sequences in bf16 on Hopper, without the package flash-attn. Attention has
sequences x heads x longest x longest elements. From 2^30 of them on the fused kernel is left out;
below, its backward pass takes a workspace. Whether a model is trained or frozen makes no
difference: frozen models are in training mode, too. Not here: attention without this setting, whose
fused kernels keep what model_size.py counts.
"""

import math
from dataclasses import dataclass

from stable_opd_mcore.planning.hardware import GIB
from stable_opd_mcore.planning.job import Job
from stable_opd_mcore.planning.model_size import ModelSize

FUSED_ELEMENTS = 2**30
# Per element. The figure is that of Transformer Engine's authors for two sequences; for four they
# give four times as much.
WORKSPACE_BYTES = 128
# Unfused, for each element: torch's softmax saves its fp32 output, the product with the values its
# bf16 input. In the layer at work stand beside them: forward the bf16 product of queries and keys,
# its fp32 copy and the bf16 softmax; backward two gradients in fp32.
SAVED_BYTES, FORWARD_BYTES = 6, 14
BACKWARD_BYTES = 8


@dataclass(frozen=True)
class Attention:
    """One layer's attention over the largest micro-batch on one rank."""

    sequences: int
    heads: int
    longest: int  # tokens

    @property
    def elements(self) -> int:
        return self.sequences * self.heads * self.longest**2

    @property
    def is_fused(self) -> bool:
        return self.elements < FUSED_ELEMENTS

    @property
    def name(self) -> str:
        """Of what it holds."""
        return "attention's workspace" if self.is_fused else "attention's scores, unfused"

    @property
    def layer_bytes(self) -> float:
        """What one layer keeps for its backward pass where attention is not fused."""
        return SAVED_BYTES * self.elements

    def trained_bytes(self, layers: float) -> float:
        """In the update, where `layers` layers keep what their backward pass reads."""
        if self.is_fused:
            return WORKSPACE_BYTES * self.elements
        return max(1.0, layers) * self.layer_bytes + BACKWARD_BYTES * self.elements

    @property
    def scored_bytes(self) -> float:
        """In a pass without gradients."""
        return 0 if self.is_fused else FORWARD_BYTES * self.elements

    @property
    def sum(self) -> str:
        """As "8 sequences x 7 heads x 8448^2 tokens = 3.72 x 2^30 elements"."""
        number = self.elements / FUSED_ELEMENTS
        return (
            f"{self.sequences} sequences x {self.heads} heads x {self.longest}^2 tokens = "
            f"{number:.2f} x 2^30 elements"
        )

    def line(self) -> str:
        """What the setting costs, for the plan."""
        if self.is_fused:
            return (
                f"train.deterministic: attention of {self.sum} is fused, with a workspace of about "
                f"{self.trained_bytes(0) / GIB:.1f} GiB"
            )
        return (
            f"train.deterministic: attention of {self.sum} is not fused (Transformer Engine's "
            f"limit is 2^30): scores of {self.layer_bytes / GIB:.1f} GiB a layer"
        )


def deterministic_attention(job: Job, size: ModelSize) -> Attention:
    """The attention of one of the job's models in the largest micro-batch."""
    heads = size.architecture.num_attention_heads // job.layout.tensor
    return Attention(math.ceil(job.micro_batch_tokens / job.work.tokens), heads, job.longest)
