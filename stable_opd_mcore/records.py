"""The records that flow through one training step: Prompt -> Rollout -> Sample -> MicroBatch ->
LossOutput.

Frozen dataclasses with a shape on every field; no behaviour that needs a device, a model or a
process group. Prompts, rollouts and samples are plain Python (they cross ranks and files); micro-
batches hold tensors.

Dimensions: T tokens that enter the model in one micro-batch (several sequences packed end to end),
S sequences in it, N response tokens that are scored and trained on (N <= T), K entries of a top-K
list, H hidden size, V common vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
SampleSource = Literal["rollout", "golden"]
AnswerFormat = Literal["boxed", "bracket"]  # by math-verify; "[a]" at the end


@dataclass(frozen=True)
class Prompt:
    """One problem as the student sees it."""

    prompt_id: str  # "<source>:<row>", unique within a run
    text: str  # the problem as in the source
    token_ids: tuple[int, ...]  # chat template applied, generation prompt included
    answer: str | None = None  # gold final answer, for grading
    golden_token_ids: tuple[int, ...] | None = None  # golden response, its stop token included
    answer_format: AnswerFormat = "boxed"  # how a response states its final answer, for grading
    opens_thinking: bool = False  # the prompt ends inside <think>: a response must close it


@dataclass(frozen=True)
class Rollout:
    """One response that the behaviour student drew for a prompt."""

    prompt: Prompt
    sample_index: int  # 0 .. samples_per_prompt-1
    token_ids: tuple[int, ...]  # ends with its stop token when finish_reason is "stop"
    rollout_logprobs: tuple[float, ...]  # per token, full softmax at the sampling temperature
    finish_reason: FinishReason
    weight_version: int  # version of the student's weights it was drawn from
    text: str = ""  # decoded response, without the stop token
    reward: float | None = None  # 1.0 / 0.0 by the grader, None when not graded


@dataclass(frozen=True)
class Sample:
    """A rollout or a golden solution as it is trained on."""

    source: SampleSource
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    trained: tuple[bool, ...]  # per response token: False where a token mask removes it
    rollout_logprobs: tuple[float, ...] | None = None  # None for golden solutions
    repetitive: tuple[bool, ...] | None = None  # in the maximal periodic suffix
    reward: float | None = None
    truncated: bool = False


@dataclass(frozen=True)
class TokenWeights:
    """Per response token of one sample: the weight of each loss component, global normaliser
    included.
    """

    pg: tuple[float, ...]
    kl: tuple[float, ...]
    sft: tuple[float, ...]
    advantage: tuple[float, ...] | None = None  # given (grpo); None: from scores


@dataclass(frozen=True)
class Scores:
    """What one model says of a micro-batch's N response tokens, at the sampling temperature.

    The same record for teacher, reference and student. A field is None where it was not asked for.
    """

    # fp32, of the stop class where the target is a stop token. None: only hidden_NH is given, and
    # the loss computes log-probabilities and entropy from it.
    logprob_N: Tensor | None
    token_logprob_N: Tensor | None = None  # fp32, of the token itself; a served teacher has none
    entropy_N: Tensor | None = None  # fp32
    topk_ids_NK: Tensor | None = None  # int64, most probable first, common vocabulary
    topk_logprobs_NK: Tensor | None = None  # fp32, of the full softmax
    hidden_NH: Tensor | None = None  # the model's last hidden states; H is its own hidden size


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences for one forward pass on this data-parallel rank, or its slice of them.

    The model reads tokens_T, positions_T, cu_seqlens; the loss reads the N rows whose next token is
    a response token. Weights hold the global normaliser already, so the loss is a plain sum over N,
    and sums over micro-batches and data-parallel ranks are the global loss. An empty micro-batch
    has N = 0. Under context parallelism T and N count this rank's slice, cu_seqlens and max_seqlen
    the whole sequences (parallel/context.py).
    """

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, restarts at 0 for every sequence
    cu_seqlens: Tensor  # int32 [S+1], padding is a last sequence of its own
    max_seqlen: int
    rows_N: Tensor  # int64, index into T of the position that predicts each response token
    targets_N: Tensor  # int64, the response token
    sample_index_N: Tensor  # int64, which sample of the global batch the token belongs to
    token_index_N: Tensor  # int64, position of the token within its response
    pg_weight_N: Tensor  # fp32, 0 on golden and masked tokens
    kl_weight_N: Tensor  # fp32
    sft_weight_N: Tensor  # fp32, 0 on rollouts
    rollout_logprob_N: Tensor  # fp32, 0 on golden tokens
    repetitive_N: Tensor  # bool
    given_advantage_N: Tensor | None = None  # fp32, for objectives without a teacher
    # fp32, of the behaviour policy: as the loss compares it, of the stop class where the target is
    # a stop token; and of the token itself, which alone is known of rollouts from other weights
    old_logprob_N: Tensor | None = None
    old_token_logprob_N: Tensor | None = None  # both None: the behaviour policy is the current one
    teacher: Scores | None = None
    reference: Scores | None = None


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's loss: a differentiable sum, and what it was made of (detached, fp32)."""

    loss: Tensor  # scalar, = pg + kl + sft, coefficients included
    pg: Tensor  # scalar
    kl: Tensor  # scalar
    sft: Tensor  # scalar
    student_logprob_N: Tensor  # of the stop class where the teacher's is; compare the two
    token_logprob_N: Tensor  # of the token itself; compare with rollouts and the reference
    entropy_N: Tensor
    advantage_N: Tensor  # 0 where pg_weight is 0
    ratio_clipped_N: Tensor  # bool: the clip bound was active
    kl_reference_N: Tensor  # KL(student || reference) per prefix, 0 where not computed
    kl_teacher_N: Tensor  # log pi_student - log pi_teacher, or exact where computed
    reference_logprob_N: Tensor  # of the target token, 0 without a reference
    teacher_logprob_N: Tensor  # of the target or its stop class, 0 without a teacher
    teacher_entropy_N: Tensor  # 0 where the loss has not the teacher's logits
