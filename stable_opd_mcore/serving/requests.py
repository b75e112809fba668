"""What servers are asked, and what the answers are: plain records. L: tokens of a response."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import DTypeLike, NDArray

from stable_opd_mcore.data.chat_api import ChatRequest, RequestError
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Sampling, SequenceScores

_EXCLUDED_LOGIT_BIAS = -1e9  # gives probability 0; JSON has no infinity
# Every sampling setting is sent: for those left out, a server may have defaults of its own.
_PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0}
_PLAIN_SAMPLING |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
_MAX_REPLY_BYTES = 32 * 1024**2  # longest reply of routes other than /generate
_BYTES_PER_ENTRY = 256  # a reply's, per token and listed log-probability; SGLang sends up to 60


Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Routing:
    """The shape of a model's choices of experts."""

    num_layers: int
    num_experts: int
    per_token: int
    num_dense_layers: int = 0  # first layers, for which a server says anything

    @property
    def per_position(self) -> int:
        return self.num_layers * self.per_token

    def parse(self, encoded: str, dtype: DTypeLike, positions: int) -> NDArray[np.int16]:
        """[positions, num_layers, per_token] from the base64 of an array of `dtype`.

        Raises:
            ValueError: no base64, another number of choices, an expert that does not exist, or one
                twice.
        """
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype)
        if flat.size != positions * self.per_position:
            raise ValueError(f"{flat.size} experts for {positions} x {self.per_position} choices")
        given = flat.reshape(positions, self.num_layers, self.per_token)
        routed = given[:, self.num_dense_layers :]
        if routed.size and not 0 <= routed.min() <= routed.max() < self.num_experts:
            raise ValueError(f"experts outside 0 .. {self.num_experts - 1}")
        chosen = np.zeros(given.shape, np.int16)
        chosen[:, self.num_dense_layers :] = routed
        if (np.diff(np.sort(routed, axis=-1), axis=-1) == 0).any():
            raise ValueError("an expert is chosen twice for one token")
        return chosen


class Request(Generic[Reply]):
    """One request, whose reply is read into a `Reply`."""

    method: str = "POST"
    path: str = "/generate"

    @property
    def max_reply_bytes(self) -> int:
        """A longer reply is refused."""
        return _MAX_REPLY_BYTES

    def payload(self) -> Mapping[str, Any] | None:
        """The body before it is encoded, None without one. Raises UserError for an id outside the
        vocabulary, which would crash the server."""
        raise NotImplementedError

    def body(self) -> bytes:
        payload = self.payload()
        return b"" if payload is None else orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)


@dataclass(frozen=True)
class Call(Request[Any]):
    """A request with a JSON reply."""

    method: str
    path: str
    content: Mapping[str, Any] | None = None

    def payload(self) -> Mapping[str, Any] | None:
        return self.content


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled response of L tokens, or the rest of one."""

    token_ids: NDArray[np.int32]  # [L], with its stop token
    logprobs: NDArray[np.float32]  # [L], full softmax at the sampling temperature
    finish_reason: Ending  # open: its request was aborted before it ended
    weight_versions: tuple[str, ...]  # several, in order, if the weights changed meanwhile
    cached_tokens: int  # prompt tokens that the server's prefix cache held
    # passes that judged a draft's tokens, and how many of these they accepted; 0 without a draft
    judgements: int = 0
    accepted_tokens: int = 0
    # int16 [prompt and response tokens - 1, layers, experts of a token]; None: not requested
    routed_experts: NDArray[np.int16] | None = None
    text: str = ""  # the whole turn without its stop token; "" if it is not finished

    @property
    def has_tokens(self) -> bool:
        return len(self.token_ids) > 0


@dataclass(frozen=True, eq=False)
class Generation(Request[Completion]):
    """A request for one turn after its context, or for the rest of one."""

    token_ids: Sequence[int] | NDArray[np.int32]
    sampling: Sampling
    vocab_size: int  # no id at or above it is sent or accepted
    padded_vocab_size: int = 0  # rows of the served model; ids from vocab_size on are not sampled
    routing: Routing | None = None  # ask for the experts that the server chose
    num_sampled: int = 0  # how many of token_ids, at their end, begin the turn
    # the server's name of the low-rank factors that answer; None: its weights without any
    adapter: str | None = None

    @property
    def max_reply_bytes(self) -> int:
        longest = self.sampling.max_new_tokens
        positions = len(self.token_ids) + longest
        routing_bytes = 0 if self.routing is None else 6 * self.routing.per_position  # base64
        return _MAX_REPLY_BYTES + _BYTES_PER_ENTRY * longest + routing_bytes * positions

    def payload(self) -> dict[str, Any]:
        _require_in_vocabulary(self.token_ids, self.vocab_size)
        padding = range(self.vocab_size, self.padded_vocab_size)
        return {
            "input_ids": self.token_ids,
            "sampling_params": {
                # applied before the softmax, so log-probabilities exclude the padding rows
                "logit_bias": {str(token): _EXCLUDED_LOGIT_BIAS for token in padding} or None,
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                **_PLAIN_SAMPLING,
                "max_new_tokens": self.sampling.max_new_tokens,
                "stop_token_ids": list(self.sampling.stop_token_ids),
                "ignore_eos": False,  # True would ignore stop_token_ids as well
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "return_routed_experts": self.routing is not None,
            "lora_path": self.adapter,
        }


UNUSED_POSITIONS = 7  # SGLang refuses sequences longer than its window minus these


@dataclass(frozen=True, eq=False)
class Scoring(Request[SequenceScores]):
    """A request for the log-probabilities of a given sequence."""

    token_ids: Sequence[int] | NDArray[np.int32]
    start: int  # first token to score, at least 1
    vocab_size: int
    top_k: int = 0
    extra_ids: tuple[int, ...] = ()  # also score these ids at every position
    any_top_id: bool = False  # accept ids of padding rows in the top-K lists
    adapter: str | None = None  # see Generation

    @property
    def max_reply_bytes(self) -> int:
        entries = 1 + self.top_k + len(self.extra_ids)
        return _MAX_REPLY_BYTES + _BYTES_PER_ENTRY * len(self.token_ids) * entries

    def payload(self) -> dict[str, Any]:
        assert self.start >= 1, "nothing predicts a sequence's first token"
        _require_in_vocabulary(self.token_ids, self.vocab_size)
        return {
            "input_ids": self.token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": self.start - 1,  # the reply's first entry has no log-probability
            "top_logprobs_num": self.top_k,
            "token_ids_logprob": list(self.extra_ids) or None,
            "return_flat_raw_top_logprobs": self.top_k > 0,
            "return_flat_raw_top_logprobs_b64": self.top_k > 0,
            "lora_path": self.adapter,
        }


def _require_in_vocabulary(token_ids: Sequence[int] | NDArray[np.int32], vocab_size: int) -> None:
    """Raise UserError for an id outside [0, vocab_size)."""
    ids = np.asarray(token_ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise UserError(
            f"token id {outside[0]} is outside the server's vocabulary of {vocab_size}, and is not "
            "sent: the tokenizer belongs to another model; set tokenizer.path to the student's"
        )


class AgentCall(NamedTuple):
    """A request of an agent, which the trainer answers."""

    number: int  # of the call, in the process that talks to servers
    secret: str  # of the URL, which says whose request it is
    request: ChatRequest


class HungUp(NamedTuple):
    """The client of a call has gone before its reply was sent."""

    call: AgentCall


class Refused(NamedTuple):
    """An agent has sent what is no request, and got an error."""

    secret: str
    error: RequestError
