"""The records of one training step: Prompt -> Rollout -> Sample -> MicroBatch -> LossOutput.

Frozen dataclasses; every field states its shape and unit. Tokens, log-probabilities and masks of
rollouts and samples are numpy arrays, because they cross ranks and files; micro-batches hold
tensors. No behaviour here needs a device, a model or a process group.

A name's suffix is its shape:
    T  tokens of one micro-batch that enter the model, its sequences packed end to end
    S  sequences of the micro-batch, the padding at its end included
    N  sampled tokens, one row of the loss each: of one sample, or of a micro-batch (N <= T)
    K  entries of a top-K list
    E  token ids that are looked up at every token
    G  rows of golden solutions
    L  sampled tokens of one rollout, or tokens of one sequence
    Y  layers of the student
    X  experts that a router chooses for a token
    H  hidden size of the model that the field belongs to
    B  samples of a step, of a minibatch, or of this rank
Log-probabilities and entropies are in nats, over the common vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Why a response has no verdict and counts as wrong; "invalid": the reward is no finite number.
GradingFailure = Literal["timeout", "crash", "invalid"]
SampleKind = Literal["rollout", "golden"]
MIN_TEMPERATURE = 1e-3  # logits of a thousand over it are a million, exact to 1/16 in fp32
_Rows = TypeVar("_Rows", bound=Any)  # a dataclass
AnswerFormat = Literal["boxed", "bracket"]  # graded by math-verify; exactly "[answer]" at the end


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled; training and evaluation have one each."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    max_new_tokens: int = 1024
    num_samples: int = 1  # responses per prompt
    stop_token_ids: tuple[int, ...] = ()  # a response ends with, and includes, the first of these
    seed: int = 0  # seeds the noise, with step, prompt and sample index
    scored: bool = False  # a served teacher scores each response as soon as it ends
    # The finished steps of the run, which limit the turns of an episode; None: held-out responses
    training_step: int | None = None
    # sampling.horizon_start and horizon_steps, for turns whose environment has its own most tokens
    horizon: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(
                f"temperature {self.temperature} is negative; set 0 for greedy decoding, or more"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise UserError(
                f"temperature {self.temperature} is too small to divide logits by: set at least "
                f"{MIN_TEMPERATURE}, or 0 for greedy decoding"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is outside (0, 1]; set 1 for all tokens")
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class Use:
    """What a run does with the prompts of a source."""

    objective: int = 0  # a place in Config.objectives_and_teachers
    is_sampled: bool = True  # False: only its golden solutions are trained on
    is_taught: bool = True  # the objective asks a teacher, where the run has one


@dataclass(frozen=True)
class Prompt:
    """One problem as the student reads it."""

    prompt_id: str  # "<source>:<row>", unique within a run
    text: str  # the problem, before the chat template
    token_ids: tuple[int, ...]  # chat template applied, generation prompt included
    answer: str | None = None  # gold final answer; None: responses are not graded
    golden_token_ids: tuple[int, ...] | None = None  # golden response, its stop token included
    answer_format: AnswerFormat = "boxed"  # how a response states its final answer
    opens_thinking: bool = False  # the prompt ends inside a thought, which a response must end
    # The row as its source has it, where something reads its columns (data/rows.py)
    columns: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    # `teacher.prompt` of the row; None: the teacher reads token_ids. Not in files of rollouts.
    teacher_token_ids: tuple[int, ...] | None = field(default=None, compare=False)
    slot: int = field(default=0, compare=False)  # its place in the data order, over the whole run
    # What answers the student's turns: a key of Interaction.environments; None: it has one turn
    environment: str | None = field(default=None, compare=False)
    max_new_tokens: int | None = field(default=None, compare=False)  # of a turn; None: Sampling's
    # The messages that token_ids render, without data.system_prompt
    messages: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    # The tools that token_ids name: data/tool_schemas.py
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    # Tokens of the golden turns, of which every other one is observed; (): golden_token_ids are one
    golden_turn_tokens: tuple[int, ...] = field(default=(), compare=False)
    # The golden turns, and what comes between them
    golden_messages: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    # Golden turns before the student's first one: they are in token_ids, or, with an environment,
    # they are said to it (rollout/played_turns.py)
    num_played: int = field(default=0, compare=False)
    use: Use = field(default=Use(), compare=False)


class _WithArrays:
    """A dataclass with arrays: sequences become arrays, and equality compares their elements."""

    _DTYPES: ClassVar[dict[str, type[np.generic]]]

    def __post_init__(self) -> None:
        for name, dtype in self._DTYPES.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.asarray(value, dtype))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = vars(self), vars(other)
        return all(_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return bool(np.array_equal(left, right))  # pyright: ignore[reportUnknownArgumentType]
    return left == right


@dataclass(frozen=True, eq=False)
class SequenceScores(_WithArrays):
    """A served model's scores of L tokens of a sequence, at temperature 1, in nats. K and E are 0
    where they were not requested."""

    _DTYPES: ClassVar = {
        "logprobs_L": np.float32,
        "top_ids_LK": np.int32,
        "top_logprobs_LK": np.float16,
        "extra_logprobs_LE": np.float32,
    }

    logprobs_L: NDArray[np.float32]  # the token's own
    top_ids_LK: NDArray[np.int32]  # most probable first
    # Half precision, because they are most of what travels: a log-probability of -2 is exact to
    # .001, one of -8 to .004.
    top_logprobs_LK: NDArray[np.float16]
    extra_logprobs_LE: NDArray[np.float32]  # E ids that are looked up at every token

    @staticmethod
    def join(parts: Sequence[SequenceScores]) -> SequenceScores:
        """The scores of all parts, one after the other."""
        return SequenceScores(
            **{
                name: np.concatenate([vars(part)[name] for part in parts])
                for name in vars(parts[0])
            }
        )

    def select(self, index: NDArray[Any] | slice) -> SequenceScores:
        """The scores of the tokens at `index`."""
        return SequenceScores(**{name: values[index] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Segment:
    """Tokens of a response, one after the other, that weights of one version sampled."""

    num_tokens: int
    weight_version: int


@dataclass(frozen=True)
class Turn:
    """Tokens that the student sampled in one go, and what it observed before them."""

    num_tokens: int  # the sampled ones
    finish_reason: Ending
    before: tuple[int, ...] = ()  # token ids, after the turn before or, first, the prompt
    restarts: bool = False  # `before` is all that the student reads here: a new context begins
    text: str = ""  # the sampled tokens, decoded, without the stop token
    observed: str = ""  # `before`, decoded
    # What `before` says, in OpenAI's form; (): first, the row's prompt. Not in files.
    messages: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class Rollout(_WithArrays):
    """One episode: L tokens that the student sampled for a prompt, in one turn or in several."""

    _DTYPES: ClassVar = {"token_ids": np.int32, "rollout_logprobs": np.float32}

    prompt: Prompt
    sample_index: int  # 0 .. samples_per_prompt - 1
    token_ids: NDArray[np.int32]  # [L], the stop token of each turn that has one included
    rollout_logprobs: NDArray[np.float32]  # [L], nats, full softmax at sampling temperature
    finish_reason: Ending  # of the episode; that of its last turn may differ
    weight_version: int  # version of the student's weights that sampled its first token
    text: str = ""  # of its last turn
    reward: float | None = None  # 0 to 1: 1 right, 0 wrong; None: not graded
    grading_failure: GradingFailure | None = None  # why grading ended without a verdict
    # int16 [tokens of a context - 1, Y, X], its contexts one after the other: the experts that the
    # engine chose for each token but the last; None without rollout.routing_replay
    routed_experts: NDArray[np.int16] | None = None
    # L tokens together, in order; not given: all have weight_version
    segments: tuple[Segment, ...] = ()
    teacher_scores: SequenceScores | None = None  # None: no server has scored it
    # L tokens together, in order, those of a context one after the other; not given: one turn
    turns: tuple[Turn, ...] = ()
    seed: int | None = None  # of its environment's world; None: it has no environment
    metrics: Mapping[str, float] = field(
        default_factory=dict[str, float]
    )  # what its environment returned
    feedback: str | None = None  # what environment or reward function say of it, for the teacher
    # what became of an agent's requests, and of its tokens (rollout/agent_account.py)
    account: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.segments:
            whole = (Segment(len(self.token_ids), self.weight_version),)
            object.__setattr__(self, "segments", whole)
        if not self.turns:
            object.__setattr__(self, "turns", (self._only_turn,))

    @property
    def problem(self) -> str:
        """What the student read first: its environment may have put it in the row's place."""
        first = self.turns[0]
        return first.observed if first.restarts else self.prompt.text

    @property
    def has_one_turn(self) -> bool:
        """Whether it is one response to its prompt."""
        return self.turns == (self._only_turn,)

    @property
    def _only_turn(self) -> Turn:
        return Turn(len(self.token_ids), self.finish_reason, text=self.text)


@dataclass(frozen=True, eq=False)
class Sample(_WithArrays):
    """A golden solution, or one context of a rollout, as it is trained on: a sequence of L tokens.

    N of them are "sampled", by the student or by whoever wrote the golden solution. The others, the
    prompt and what the student observed between its own tokens, have no row in the loss.
    """

    _DTYPES: ClassVar = {
        "token_ids": np.int32,
        "places": np.int32,
        "teacher_prompt_token_ids": np.int32,
        "trained": np.bool_,
        "rollout_logprobs": np.float32,
        "repetitive": np.bool_,
        "turns": np.int32,
        "turn_truncated": np.bool_,
    }

    kind: SampleKind
    prompt_id: str
    token_ids: NDArray[np.int32]  # [L], the prompt and all that follows
    places: NDArray[np.int32]  # [N], those of the sampled tokens in token_ids, increasing
    num_prompt_tokens: int  # at least 1, at most places[0]
    trained: NDArray[np.bool_]  # [N], False where a token mask removes the token from the loss
    rollout_logprobs: NDArray[np.float32] | None = None  # [N], nats; None for golden solutions
    # [N], inside the maximal periodic suffix of its turn; None: nowhere
    repetitive: NDArray[np.bool_] | None = None
    episode: int = 0  # Rollout.sample_index; the rollout may have several samples
    reward: float | None = None  # see Rollout
    truncated: bool = False  # the rollout ended as "length"
    turns: NDArray[np.int32] | None = None  # [N], the number of its turn, from 0; None: the first
    # [N], inside a turn that ended as "length"; None: nowhere
    turn_truncated: NDArray[np.bool_] | None = None
    routed_experts: NDArray[np.int16] | None = None  # see Rollout; of this context
    off_policy: bool = False  # the golden solution, not the rollouts, carries the policy term (gkd)
    # Prompt.teacher_token_ids; None where the teacher reads the student's prompt
    teacher_prompt_token_ids: NDArray[np.int32] | None = None
    teacher_scores: SequenceScores | None = None  # of the N tokens; see Rollout
    slot: int = 0  # see Prompt
    objective: int = 0  # see Use
    is_taught: bool = True  # see Use

    @property
    def ends_turn(self) -> NDArray[np.bool_]:
        """[N], whether it is the last token of its turn."""
        turns = np.zeros_like(self.places) if self.turns is None else self.turns
        return np.diff(turns, append=-1) != 0

    @property
    def num_truncated_turns(self) -> int:
        """Turns that ended as "length"; without tokens it counts as one turn."""
        if self.turn_truncated is None or not len(self.places):
            return int(self.truncated)
        return int(self.turn_truncated[self.ends_turn].sum())

    @property
    def is_scored(self) -> bool:
        """Whether other models score it: golden solutions only if they are off-policy."""
        return self.kind == "rollout" or self.off_policy


@dataclass(frozen=True)
class Scores:
    """One model's scores of N sampled tokens, at the sampling temperature; None: not requested."""

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

    Token weights contain the global normaliser, so the sum over N, micro-batches and data-parallel
    ranks is the global loss. An empty micro-batch has N = 0. Under context parallelism T and N
    count this rank's slice; cu_seqlens and max_seqlen describe whole sequences. Where sequences
    share what they begin with (data/shared_prefixes.py), cu_seqlens bounds the tokens of their own.
    """

    tokens_T: Tensor  # [T] int64
    positions_T: Tensor  # [T] int64, from 0 in every sequence
    cu_seqlens: Tensor  # [S + 1] int32, where sequences begin and end; padding is the last one
    max_seqlen: int  # tokens of the longest sequence
    rows_N: Tensor  # [N] int64, the place in T that predicts the sampled token
    targets_N: Tensor  # [N] int64, the sampled token
    sample_index_N: Tensor  # [N] int64, the token's sample in this rank's list, given to `pack`
    token_index_N: Tensor  # [N] int64, the token's place among its sample's sampled ones
    turn_N: Tensor  # [N] int64, the token's turn in its episode, from 0
    index_in_turn_N: Tensor  # [N] int64, the token's place among the sampled ones of its turn
    golden_N: Tensor  # [N] bool, of a golden solution, not of a rollout
    pg_weight_N: Tensor  # [N] fp32, 0 on masked tokens, and on golden ones but for gkd's off-policy
    kl_weight_N: Tensor  # [N] fp32
    sft_weight_N: Tensor  # [N] fp32, 0 on rollouts
    rollout_logprob_N: Tensor  # [N] fp32, nats, as the engine sampled; 0 on golden tokens
    repetitive_N: Tensor  # [N] bool, see Sample
    truncated_N: Tensor  # [N] bool, of a rollout's turn that ended as "length"
    golden_rows_G: Tensor  # [G] int64, where golden_N is True; on the host
    is_scored: bool = True  # False: all samples are golden solutions that no other model scores
    objective: int = 0  # see Use
    is_taught: bool = True  # the teacher scores it, if it is scored
    given_advantage_N: Tensor | None = None  # [N] fp32, of grpo; None: computed from scores
    # [T, Y, X] int16, the experts that the rollout engine chose; -1 where it chose none
    routed_experts_TYX: Tensor | None = None
    # Where sequences share tokens, else None: what each one attends to, the places in T of all its
    # tokens, one sequence after the other, and where these begin and end
    key_places_K: Tensor | None = None  # [K] int64
    cu_seqlens_keys: Tensor | None = None  # [S + 1] int32
    # Behaviour policy's log-probabilities; both are None if it is the current student. A policy
    # known only by its rollouts (rollout.max_staleness) has only token_logprobs.
    old_logprob_N: Tensor | None = None  # [N] fp32, nats, of the stop class as in Scores
    old_token_logprob_N: Tensor | None = None  # [N] fp32, nats, of the token itself
    # A served teacher's scores as they arrived (SequenceScores); None without one, and where
    # is_scored is False
    served_logprob_N: Tensor | None = None  # [N] fp32, nats
    served_top_ids_NK: Tensor | None = None  # [N, K] int32
    served_top_logprobs_NK: Tensor | None = None  # [N, K] fp16, nats
    served_extra_logprobs_NE: Tensor | None = None  # [N, E] fp32, nats
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
    # [N] nats, 0 where pg_weight_N is 0. None, as the next one: the objective has no such thing
    advantage_N: Tensor | None
    ratio_clipped_N: Tensor | None  # [N] bool, the clip bound was active
    kl_reference_N: Tensor  # [N] nats, KL(student || reference) at the row; 0 where not computed
    kl_teacher_N: Tensor  # [N] nats, log-ratio student / teacher, or the exact KL where computed
    reference_logprob_N: Tensor  # [N] nats, of the token; 0 without a reference
    teacher_logprob_N: Tensor  # [N] nats, of the stop class; 0 without a teacher
    teacher_entropy_N: Tensor  # [N] nats, 0 where the loss does not compute the teacher's logits


def fields_of_rows(record: object) -> dict[str, Any]:
    """What a record holds for each row: the fields named ..._N, or ..._N and another letter."""
    return {
        name: value
        for name, value in vars(record).items()
        if value is not None and name.rpartition("_")[2][:1] == "N"
    }


def split_rows(record: _Rows, count: int) -> list[_Rows]:
    """The record in blocks of `count` rows, the last one shorter. All of them are views."""
    parts: dict[str, Sequence[Any]] = {
        name: split_rows(value, count)
        for name, value in vars(record).items()
        if isinstance(value, Scores)
    }
    parts |= {name: value.split(count) for name, value in fields_of_rows(record).items()}
    blocks = zip(*parts.values(), strict=True)
    return [replace(record, **dict(zip(parts, block, strict=True))) for block in blocks]
