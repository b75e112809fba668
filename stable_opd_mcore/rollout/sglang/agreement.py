"""Whether servers that have new weights sample with the trainer's probabilities.

Equal checksums show equal parameters, not what a server computes from them: SGLang derives further
matrices when an update ends (of kv_b_proj, which its decoding reads in place of it), and takes
scales, windows and rotary angles from config.json. So each server samples a short text as it
samples rollouts, and the trainer computes the log-probabilities of the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module

from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import World, broadcast_object
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.given_texts import logprobs_of
from stable_opd_mcore.rollout.sglang.transports import Target, ask_all
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.requests import Completion, Generation

_NUM_TOKENS = 8  # given, and as many sampled
_LOGITS_SPREAD = 3.0  # nats: the standard deviation of a language model's logits, roughly


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference of two log-probabilities, in nats, that is put down to rounding.

    Half of the digits of the logits agree: sqrt(u) of their spread, .27 in bf16 and .001 in fp32.
    Independent errors of relative size u add up to sqrt(u) only after 1/u operations that follow
    one another, more than a model has layers.
    """
    return _LOGITS_SPREAD * torch.finfo(dtype).eps ** 0.5


def median_gap(a_L: NDArray[np.float32], b_L: NDArray[np.float32]) -> float:
    """How far two models' log-probabilities of the same tokens are apart, in nats. The median,
    since a router may choose another expert for a token after rounding."""
    return float(np.median(np.abs(a_L - b_L)))


def disagreements(
    chunks: Sequence[Module],
    world: World,
    targets: Sequence[Target],
    dtype: torch.dtype,
    adapter: str | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """How servers' probabilities differ from the trainer's, and why others gave none; by name.

    Collective over the ranks that send weights together (`send_weights`).

    Args:
        targets: [] on ranks that send nothing.
        dtype: the servers' precision.
        adapter: the servers' name of the low-rank factors.
    """
    size = architecture_of(chunks).vocab_size
    prompt = tuple(i * size // _NUM_TOKENS for i in range(_NUM_TOKENS))
    request = Generation(prompt, Sampling(max_new_tokens=_NUM_TOKENS), size, adapter=adapter)

    def sampled(target: Target) -> Completion:
        text = target.client.submit(request, timeouts.UPDATE).result()
        if not text.has_tokens:
            raise target.client.garbage("it samples no token after the sync")
        return text

    texts, failed = ask_all(targets, sampled)
    given = broadcast_object([text.token_ids for text in texts.values()], world.model_group)
    expected = logprobs_of(chunks, world, prompt, given)
    found: dict[str, str] = {}
    for (name, text), expected_L in zip(texts.items(), expected, strict=False):
        gap = median_gap(text.logprobs, expected_L)
        if not gap <= tolerance(dtype):
            found[name] = (
                "from the same weights it computes other log-probabilities than the trainer: they "
                f"differ by {gap:.3g} in the median, expected is at most {tolerance(dtype):.3g}"
            )
    return found, failed
