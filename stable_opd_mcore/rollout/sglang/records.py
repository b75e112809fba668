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

Decode = Callable[[Sequence[int]], str]
Ask = Callable[[Sequence[int]], Future[SequenceScores]]  # gets a response's tokens


@dataclass(frozen=True)
class Answer:
    """A response, or its tokens so far: what one request or several, one after the other, drew."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason = "abort"  # "abort": it is not finished
    # as Rollout.routed_experts; None where they are not wanted
    routed_experts: NDArray[np.int16] | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason != "abort"

    def extended(self, piece: Completion) -> Answer:
        """This answer and what a further request drew, experts as of `Task.request`. Tokens of a
        piece from several versions count as of the oldest."""
        if not len(piece.token_ids):
            return self
        version = min(int(version) for version in piece.weight_versions)
        segments, num_tokens = self.segments, len(piece.token_ids)
        if segments and segments[-1].weight_version == version:
            num_tokens += segments[-1].num_tokens
            segments = segments[:-1]
        experts = piece.routed_experts
        if experts is not None and self.routed_experts is not None:
            experts = np.concatenate([self.routed_experts, experts])
        return Answer(
            (*self.token_ids, *piece.token_ids.tolist()),
            (*self.logprobs, *piece.logprobs.tolist()),
            (*segments, Segment(num_tokens, version)),
            piece.finish_reason,
            experts,
        )


@dataclass(eq=False)
class Job:
    """The responses to one prompt, while they are drawn."""

    request: Generation  # for all of them, from their first tokens on
    # whether a member's responses come from allowed weights
    accept: Callable[[Member, Sequence[Completion]], bool]
    answers: list[Answer]  # one a sample
    step: int  # requests of a lower one are sent first
    expected_tokens: int | None = None  # length of an earlier response; None: unknown
    ask: Ask | None = None  # asks a served teacher about a response; None: nobody scores it
    # of the responses that have ended, by sample
    scores: dict[int, Future[SequenceScores]] = field(default_factory=dict)
    number: int = 0  # the order of submission

    @property
    def is_done(self) -> bool:
        return all(answer.is_done for answer in self.answers)


@dataclass(frozen=True, eq=False)
class Task:
    """One request of a job: several samples from their first tokens on, or the rest of one."""

    job: Job
    samples: tuple[int, ...]

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Its place in the queue; no two tasks have the same."""
        job = self.job
        return job.step, -(job.expected_tokens or 0), job.number, self.samples[0]

    def request(self) -> Generation:
        """Of a response that has tokens, it asks for the experts from the last of them on: no
        request before has read that token."""
        request, so_far = self.job.request, self.job.answers[self.samples[0]].token_ids
        left = request.sampling.max_new_tokens - len(so_far)
        sampling = replace(request.sampling, num_samples=len(self.samples), max_new_tokens=left)
        token_ids = (*request.token_ids, *so_far)
        start = len(token_ids) - 1 if so_far else 0
        return replace(request, token_ids=token_ids, sampling=sampling, routing_start=start)

    def num_tokens(self, expected_tokens: int) -> int:
        """Places in a server's cache that it will take; its samples share the prompt's."""
        so_far = len(self.job.answers[self.samples[0]].token_ids)
        longest = self.job.request.sampling.max_new_tokens
        response = min(max(self.job.expected_tokens or expected_tokens, so_far + 1), longest)
        return len(self.job.request.token_ids) + len(self.samples) * response


def tasks_of(job: Job) -> list[Task]:
    """The requests that finish the job: one for all samples without tokens, one for each other."""
    fresh = tuple(i for i, a in enumerate(job.answers) if not a.is_done and not a.token_ids)
    begun = [(i,) for i, a in enumerate(job.answers) if not a.is_done and a.token_ids]
    return [Task(job, samples) for samples in ([fresh] if fresh else []) + begun]


@dataclass(frozen=True)
class Draw:
    """The responses to a step's prompts, while they are drawn."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    jobs: Sequence[Job]  # one a prompt; none on ranks that are not leaders

    def rollouts(self, decode: Decode) -> list[Rollout]:
        """All that have a token; the finish_reason of unfinished ones is "abort"."""
        return [
            rollout_of(prompt, sample, answer, decode)
            for prompt, job in zip(self.prompts, self.jobs, strict=bool(self.jobs))
            for sample, answer in enumerate(job.answers)
            if answer.token_ids
        ]


def routing_of(architecture: Architecture) -> Routing | None:
    """The shape of the model's choices of experts; None for a dense one."""
    experts = architecture.experts
    if experts is None:
        return None
    return Routing(architecture.num_layers, experts.number, experts.per_token)


def rollout_of(prompt: Prompt, sample: int, answer: Answer, decode: Decode) -> Rollout:
    stopped = answer.finish_reason == "stop"
    return Rollout(
        prompt=prompt,
        sample_index=sample,
        token_ids=np.array(answer.token_ids, np.int32),
        rollout_logprobs=np.array(answer.logprobs, np.float32),
        finish_reason=answer.finish_reason,
        weight_version=answer.segments[0].weight_version,
        text=decode(answer.token_ids[: -1 if stopped else None]),
        routed_experts=answer.routed_experts,
        segments=answer.segments,
    )


def answer_of(rollout: Rollout, routing: Routing | None) -> Answer:
    """A checkpoint's rollout as an answer. It has no tokens where the rollout lacks the experts
    that `routing` asks for."""
    if routing is not None and rollout.routed_experts is None:
        return Answer()
    return Answer(
        tuple(rollout.token_ids.tolist()),
        tuple(rollout.rollout_logprobs.tolist()),
        rollout.segments,
        rollout.finish_reason,
        None if routing is None else rollout.routed_experts,
    )
