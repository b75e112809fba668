"""Between the trainer's records and a server's requests. Pure functions: nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.records import (
    FinishReason,
    Prompt,
    Rollout,
    Routing,
    Sampling,
    Segment,
    SequenceScores,
)
from stable_opd_mcore.rollout.sglang.fleet import Member
from stable_opd_mcore.serving.requests import Completion, Generation

Ask = Callable[[Sequence[int]], Future[SequenceScores]]  # gets a response's tokens
_NO_TOKENS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Answer:
    """A response, or its tokens so far: what one request or several, one after the other, drew."""

    token_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_LOGPROBS)
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason = "abort"  # "abort": it is not finished
    # as Rollout.routed_experts; None where they are not wanted
    routed_experts: NDArray[np.int16] | None = None
    text: str = ""  # once it is finished

    @property
    def is_done(self) -> bool:
        return self.finish_reason != "abort"

    @property
    def has_tokens(self) -> bool:
        return len(self.token_ids) > 0

    def extended(self, piece: Completion) -> Answer:
        """This answer and what a further request sampled. Tokens of a piece from several versions
        count as of the oldest."""
        if not piece.has_tokens:
            return self
        version = min(int(version) for version in piece.weight_versions)
        segments, num_tokens = self.segments, len(piece.token_ids)
        if segments and segments[-1].weight_version == version:
            num_tokens += segments[-1].num_tokens
            segments = segments[:-1]
        return Answer(
            np.concatenate([self.token_ids, piece.token_ids]),
            np.concatenate([self.logprobs, piece.logprobs]),
            (*segments, Segment(num_tokens, version)),
            piece.finish_reason,
            piece.routed_experts,
            piece.text,
        )


@dataclass(eq=False)
class Job:
    """The responses to one prompt, while they are drawn."""

    request: Generation  # for each of them, from its first token on
    accept: Callable[[Member, Completion], bool]  # whether a response comes from allowed weights
    answers: list[Answer]  # one a sample
    step: int  # requests of a lower one are sent first
    ask: Ask | None = None  # asks a served teacher about a response; None: nobody scores it
    # of the responses that have ended, by sample
    scores: dict[int, Future[SequenceScores]] = field(default_factory=dict)
    number: int = 0  # the order of submission
    member: Member | None = None  # the first one that computed the prompt

    @property
    def is_done(self) -> bool:
        return all(answer.is_done for answer in self.answers)


@dataclass(frozen=True, eq=False)
class Task:
    """A request of a job: a response from its first token on, or the rest of one."""

    job: Job
    sample: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its place in the queue; no two tasks have the same."""
        return self.job.step, self.sample, self.job.number

    def request(self) -> Generation:
        request, so_far = self.job.request, self.job.answers[self.sample].token_ids
        if not len(so_far):
            return request
        left = request.sampling.max_new_tokens - len(so_far)
        token_ids = np.concatenate([np.asarray(request.token_ids, np.int32), so_far])
        return replace(
            request,
            token_ids=token_ids,
            sampling=replace(request.sampling, max_new_tokens=left),
            num_sampled=len(so_far),
        )


@dataclass(frozen=True)
class Draw:
    """The responses to a step's prompts, while they are drawn."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    jobs: Sequence[Job]  # one a prompt; none on ranks that are not leaders

    def rollouts(self) -> list[Rollout]:
        return [
            rollout_of(prompt, sample, answer)
            for prompt, job in zip(self.prompts, self.jobs, strict=bool(self.jobs))
            for sample, answer in enumerate(job.answers)
        ]


def routing_of(architecture: Architecture) -> Routing | None:
    """The shape of the model's choices of experts; None for a dense one."""
    experts = architecture.experts
    if experts is None:
        return None
    return Routing(architecture.num_layers, experts.number, experts.per_token)


def rollout_of(prompt: Prompt, sample: int, answer: Answer) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample_index=sample,
        token_ids=answer.token_ids,
        rollout_logprobs=answer.logprobs,
        finish_reason=answer.finish_reason,
        weight_version=answer.segments[0].weight_version,
        text=answer.text,
        routed_experts=answer.routed_experts,
        segments=answer.segments,
    )
