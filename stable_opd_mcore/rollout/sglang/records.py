"""Between the trainer's records and a server's requests. Pure functions: nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.serving.requests import Completion, Generation, Routing

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Draw:
    """Responses being drawn ahead."""

    step: int
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    answers: Future[list[list[Completion] | None]]


def cached_share(
    requests: Sequence[Generation], answers: Sequence[Sequence[Completion] | None]
) -> Metrics:
    """The share of prompt tokens that the servers' prefix caches held."""
    drawn = [(r, c) for r, a in zip(requests, answers, strict=True) for c in a or ()]
    prompt_tokens = sum(len(request.token_ids) for request, _ in drawn)
    cached_tokens = sum(completion.cached_tokens for _, completion in drawn)
    return Metrics({"engine/prefix_cached_share": Mean(cached_tokens, prompt_tokens)})


def routing_of(architecture: Architecture) -> Routing | None:
    """The shape of the model's choices of experts; None for a dense one."""
    experts = architecture.experts
    if experts is None:
        return None
    return Routing(architecture.num_layers, experts.number, experts.per_token)


def rollouts_of(
    prompt: Prompt,
    answer: Sequence[Completion] | None,
    held: Mapping[tuple[str, int], Rollout],
    num_samples: int,
    decode: Decode,
) -> list[Rollout]:
    """The rollouts of one prompt: from `answer`, or from the checkpoint's `held` without one."""
    if answer is None:
        return [held[prompt.prompt_id, sample] for sample in range(num_samples)]
    return [
        Rollout(
            prompt=prompt,
            sample_index=sample,
            token_ids=np.array(completion.token_ids, np.int32),
            rollout_logprobs=np.array(completion.logprobs, np.float32),
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            weight_version=min(int(version) for version in completion.weight_versions),
            text=decode(completion.token_ids[: -1 if completion.finish_reason == "stop" else None]),
            routed_experts=completion.routed_experts,
        )
        for sample, completion in enumerate(answer)
    ]
