"""Between the trainer's records and a server's requests. Pure functions: nothing is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.rollout.engine import Sampling
from stable_opd_mcore.serving.requests import Completion, Generation

Decode = Callable[[Sequence[int]], str]


@dataclass
class Draw:
    """Responses being drawn ahead."""

    step: int
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    thread: threading.Thread
    answers: list[list[Completion] | None]
    error: BaseException | None = None


def request_for(
    prompt: Prompt, sampling: Sampling, vocab_size: int, padded_vocab_size: int
) -> Generation:
    """One request for all samples of a prompt, which is computed once for all of them."""
    return Generation(
        token_ids=prompt.token_ids,
        num_samples=sampling.num_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
    )


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
            token_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            weight_version=min(int(version) for version in completion.weight_versions),
            text=decode(completion.token_ids[: -1 if completion.finish_reason == "stop" else None]),
        )
        for sample, completion in enumerate(answer)
    ]
