"""The requests for the episodes of one prompt, while they are sampled. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.records import Rollout, SequenceScores
from stable_opd_mcore.rollout.episodes import Episode, WhatFollows
from stable_opd_mcore.rollout.sglang.fleet import Member
from stable_opd_mcore.serving.requests import Completion, Generation, Routing

Ask = Callable[[Rollout], Sequence[Future[SequenceScores]]]  # one for each context
Observe = Callable[[Episode], Future[WhatFollows]]  # what follows its turn


@dataclass(eq=False)
class PromptRequests:
    """The episodes of one prompt. Each turn is a request, and one more after each interruption."""

    request: Generation  # its settings; context and budget are those of an episode
    accept: Callable[[Member, Completion], bool]  # whether tokens come from allowed weights
    episodes: list[Episode]  # one a sample, as far as they are sampled
    step: int  # requests of a lower one are sent first
    window: int  # the most tokens that the student reads
    observe: Observe
    ask: Ask | None = None  # asks a served teacher about an episode; None: nobody scores it
    # of the samples whose episodes have ended
    scores: dict[int, Sequence[Future[SequenceScores]]] = field(default_factory=dict)
    number: int = 0  # the order of submission
    is_dropped: bool = False  # nobody waits for it any more
    members: set[str] = field(default_factory=set)  # names of those that have computed the prompt
    # by sample: the one that sampled its turn before, and has computed its context
    last_members: dict[int, str] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return all(episode.is_ended for episode in self.episodes)

    @property
    def rollouts(self) -> list[Rollout]:
        return [episode.rollout() for episode in self.episodes]

    def queue_key(self, sample: int) -> tuple[int, bool, int, int]:
        """The place in the queue of a sample's request; no two requests have the same."""
        is_first_turn = len(self.episodes[sample].turns) == 1
        return self.step, is_first_turn, sample, self.number

    def known_by(self, sample: int) -> Collection[str]:
        """The names of the servers that have computed most of the sample's context."""
        return (self.last_members[sample],) if sample in self.last_members else self.members

    def next_request(self, sample: int, member: Member) -> Generation:
        """What asks a server for the sample's next tokens."""
        request, episode = self.request, self.episodes[sample]
        left = episode.budget(request.sampling, self.window)
        return replace(
            request,
            token_ids=episode.context,
            sampling=replace(request.sampling, max_new_tokens=left),
            num_sampled=episode.turns[-1].num_tokens,
            adapter=member.adapter,
        )

    def extended(self, sample: int, piece: Completion) -> Episode:
        """The sample with a reply; tokens of several versions count as sampled by the oldest."""
        episode = self.episodes[sample]
        if not piece.has_tokens:
            return episode
        return episode.with_tokens(
            piece.token_ids,
            piece.logprobs,
            piece.finish_reason,
            min(map(int, piece.weight_versions)),
            text=piece.text,
            routed_experts=piece.routed_experts,
        )


def routing_of(architecture: Architecture) -> Routing | None:
    """The shape of the model's choices of experts; None for a dense model."""
    experts = architecture.experts
    if experts is None:
        return None
    layers = architecture.num_layers, architecture.num_dense_layers
    return Routing(layers[0], experts.number, experts.per_token, num_dense_layers=layers[1])
