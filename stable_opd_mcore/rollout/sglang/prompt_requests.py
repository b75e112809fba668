"""The requests for the responses to one prompt, while they are sampled. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.records import Rollout, SequenceScores
from stable_opd_mcore.rollout.sglang.fleet import Member
from stable_opd_mcore.rollout.unfinished import extended, is_finished
from stable_opd_mcore.serving.requests import Completion, Generation, Routing

Ask = Callable[[Sequence[int]], Future[SequenceScores]]  # gets a response's tokens


@dataclass(eq=False)
class PromptRequests:
    """The responses to one prompt. Each is a request, and one more after each interruption."""

    request: Generation  # asks for a response from its first token on
    accept: Callable[[Member, Completion], bool]  # whether tokens come from allowed weights
    rollouts: list[Rollout]  # one a sample, as far as they are sampled
    step: int  # requests of a lower one are sent first
    ask: Ask | None = None  # asks a served teacher about a response; None: nobody scores it
    scores: dict[int, Future[SequenceScores]] = field(default_factory=dict)  # keys: ended samples
    number: int = 0  # the order of submission
    member: Member | None = None  # the first one that computed the prompt

    @property
    def is_done(self) -> bool:
        return all(map(is_finished, self.rollouts))

    def queue_key(self, sample: int) -> tuple[int, int, int]:
        """The place in the queue of a sample's request; no two requests have the same."""
        return self.step, sample, self.number

    def next_request(self, sample: int) -> Generation:
        """What asks for the sample's next tokens."""
        request, so_far = self.request, self.rollouts[sample].token_ids
        if not len(so_far):
            return request
        left = request.sampling.max_new_tokens - len(so_far)
        return replace(
            request,
            token_ids=np.concatenate([np.asarray(request.token_ids, np.int32), so_far]),
            sampling=replace(request.sampling, max_new_tokens=left),
            num_sampled=len(so_far),
        )

    def extend(self, sample: int, piece: Completion) -> Rollout:
        """Add a reply to a sample; tokens of several versions count as sampled by the oldest."""
        if piece.has_tokens:
            self.rollouts[sample] = extended(
                self.rollouts[sample],
                piece.token_ids,
                piece.logprobs,
                piece.finish_reason,
                min(map(int, piece.weight_versions)),
                routed_experts=piece.routed_experts,
                text=piece.text,
            )
        return self.rollouts[sample]


def routing_of(architecture: Architecture) -> Routing | None:
    """The shape of the model's choices of experts; None for a dense model."""
    experts = architecture.experts
    if experts is None:
        return None
    return Routing(architecture.num_layers, experts.number, experts.per_token)
