"""The records of one training step: Prompt -> Rollout -> Sample -> MicroBatch -> LossOutput.

Frozen dataclasses; every field states its shape and unit. Prompts, rollouts and samples are plain
Python values, because they cross ranks and files; micro-batches hold tensors. No behaviour here
needs a device, a model or a process group.

A name's suffix is its shape:
    T  tokens of one micro-batch that enter the model, its sequences packed end to end
    S  sequences of the micro-batch, the padding at its end included
    N  response tokens that the micro-batch scores, one row each (N <= T)
    K  entries of a top-K list
    H  hidden size of the model that the field belongs to
Log-probabilities and entropies are in nats, over the common vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
SampleSource = Literal["rollout", "golden"]
_Rows = TypeVar("_Rows", bound=Any)  # a dataclass
AnswerFormat = Literal["boxed", "bracket"]  # graded by math-verify; exactly "[answer]" at the end


@dataclass(frozen=True)
class Prompt:
    """One problem as the student reads it."""

    prompt_id: str  # "<source>:<row>", unique within a run
    text: str  # the problem, before the chat template
    token_ids: tuple[int, ...]  # chat template applied, generation prompt included
    answer: str | None = None  # gold final answer; None: responses are not graded
    golden_token_ids: tuple[int, ...] | None = None  # golden response, its stop token included
    answer_format: AnswerFormat = "boxed"  # how a response states its final answer
    opens_thinking: bool = False  # the prompt ends inside <think>, and the response must close it


@dataclass(frozen=True)
class Rollout:
    """One response sampled from the student for a prompt."""

    prompt: Prompt
    sample_index: int  # 0 .. samples_per_prompt - 1
    token_ids: tuple[int, ...]  # ends with its stop token when finish_reason is "stop"
    rollout_logprobs: tuple[float, ...]  # per token, nats, full softmax at sampling temperature
    finish_reason: FinishReason
    weight_version: int  # version of the student's weights that sampled it
    text: str = ""  # decoded response, without the stop token
    reward: float | None = None  # 1.0 right, 0.0 wrong, None not graded


@dataclass(frozen=True)
class Sample:
    """A rollout or a golden solution as it is trained on; L response tokens."""

    source: SampleSource
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]  # [L]
    trained: tuple[bool, ...]  # [L], False where a token mask removes the token from the loss
    rollout_logprobs: tuple[float, ...] | None = None  # [L], nats; None for golden solutions
    repetitive: tuple[bool, ...] | None = None  # [L], True inside the maximal periodic suffix
    reward: float | None = None  # as Rollout.reward
    truncated: bool = False  # the rollout did not end with a stop token
    off_policy: bool = False  # the golden solution, not the rollouts, carries the policy term (gkd)


@dataclass(frozen=True)
class TokenWeights:
    """Weights of one sample's L response tokens in each loss component, normalisers included."""

    pg: tuple[float, ...]  # [L]
    kl: tuple[float, ...]  # [L]
    sft: tuple[float, ...]  # [L]
    advantage: tuple[float, ...] | None = None  # [L], of grpo; None: computed from scores


@dataclass(frozen=True)
class Scores:
    """One model's scores of a micro-batch's N response tokens, at the sampling temperature.

    The same record serves teacher, reference and student. A field that was not requested is None.
    """

    # [N] fp32, nats; of the stop class where the target is a stop token. None: only hidden_NH is
    # given, and the loss computes log-probabilities and entropy from it.
    logprob_N: Tensor | None
    token_logprob_N: Tensor | None = None  # [N] fp32, nats, of the token itself; None when served
    entropy_N: Tensor | None = None  # [N] fp32, nats
    topk_ids_NK: Tensor | None = None  # [N, K] int64, most probable first
    topk_logprobs_NK: Tensor | None = None  # [N, K] fp32, nats, of the full softmax
    hidden_NH: Tensor | None = None  # [N, H], the model's last hidden states


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences for one forward pass on this data-parallel rank, or its slice of them.

    The model reads tokens_T, positions_T and cu_seqlens. The loss reads the N rows whose next token
    is a response token. Token weights contain the global normaliser, so the loss is a plain sum
    over N, and its sum over micro-batches and data-parallel ranks is the global loss. An empty
    micro-batch has N = 0. Under context parallelism T and N count this rank's slice; cu_seqlens and
    max_seqlen describe whole sequences (parallel/context.py).
    """

    tokens_T: Tensor  # [T] int64
    positions_T: Tensor  # [T] int64, from 0 in every sequence
    cu_seqlens: Tensor  # [S + 1] int32, where sequences begin and end; padding is the last one
    max_seqlen: int  # tokens of the longest sequence
    rows_N: Tensor  # [N] int64, the place in T that predicts the response token
    targets_N: Tensor  # [N] int64, the response token
    sample_index_N: Tensor  # [N] int64, the token's sample in the list given to `pack`
    token_index_N: Tensor  # [N] int64, the token's place in its response
    pg_weight_N: Tensor  # [N] fp32, 0 on golden and masked tokens
    kl_weight_N: Tensor  # [N] fp32
    sft_weight_N: Tensor  # [N] fp32, 0 on rollouts
    rollout_logprob_N: Tensor  # [N] fp32, nats, as the engine sampled; 0 on golden tokens
    repetitive_N: Tensor  # [N] bool, inside the response's maximal periodic suffix
    given_advantage_N: Tensor | None = None  # [N] fp32, of grpo; None: computed from scores
    # Of the behaviour policy; both are None where it is the current student. A policy known by its
    # rollouts alone (async_steps) has only token_logprobs.
    old_logprob_N: Tensor | None = None  # [N] fp32, nats, of the stop class as in Scores
    old_token_logprob_N: Tensor | None = None  # [N] fp32, nats, of the token itself
    teacher: Scores | None = None
    reference: Scores | None = None


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch, a differentiable sum, and detached fp32 parts of it."""

    loss: Tensor  # [] nats, pg + kl + sft
    pg: Tensor  # [] nats, coefficients included, as in kl and sft
    kl: Tensor  # [] nats
    sft: Tensor  # [] nats
    student_logprob_N: Tensor  # [N] nats, of the stop class; compares with teacher_logprob_N
    # [N] nats, of the token, at temperature 1 on golden ones; compares with rollouts and reference
    token_logprob_N: Tensor
    entropy_N: Tensor  # [N] nats, of the student
    advantage_N: Tensor  # [N] nats, 0 where pg_weight_N is 0
    ratio_clipped_N: Tensor  # [N] bool, the clip bound was active
    kl_reference_N: Tensor  # [N] nats, KL(student || reference) at the row; 0 where not computed
    kl_teacher_N: Tensor  # [N] nats, log-ratio student / teacher, or the exact KL where computed
    reference_logprob_N: Tensor  # [N] nats, of the token; 0 without a reference
    teacher_logprob_N: Tensor  # [N] nats, of the stop class; 0 without a teacher
    teacher_entropy_N: Tensor  # [N] nats, 0 where the loss does not compute the teacher's logits


def split_rows(record: _Rows, count: int) -> list[_Rows]:
    """The record in blocks of `count` rows, the last one shorter: cuts every field named ..._N or
    ..._N followed by another letter. Views; one operation per field for all blocks.
    """
    parts: dict[str, Sequence[Any]] = {}
    for name, value in vars(record).items():
        if isinstance(value, Scores):
            parts[name] = split_rows(value, count)
        elif value is not None and name.rpartition("_")[2][:1] == "N":
            parts[name] = value.split(count)
    blocks = zip(*parts.values(), strict=True)
    return [replace(record, **dict(zip(parts, block, strict=True))) for block in blocks]
