"""Log-probabilities of texts that another engine sampled, by the embedded engine: token by token,
from cached keys and values, as servers compute them when they sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from stable_opd_mcore.rollout.noise import row_key


def logprobs_of(
    chunks: Sequence[torch.nn.Module],
    world: World,
    prompt: Sequence[int],
    texts: Sequence[NDArray[np.int32]],
) -> list[NDArray[np.float32]]:
    """The model's log-probabilities [L] of each text's tokens [L] after the prompt.

    Collective over the replica's ranks, and over those that share its experts, whose texts may be
    others, or none.
    """
    size = architecture_of(chunks).vocab_size
    longest = max(map(len, texts), default=1)
    sampling = Sampling(num_samples=max(1, len(texts)), max_new_tokens=longest)
    by_key = {row_key(0, 0, "text", index): text for index, text in enumerate(texts)}

    def given(
        logits_BV: Tensor, keys_B: Tensor, positions_B: Tensor, _: Sampling
    ) -> tuple[Tensor, Tensor]:
        at = [
            (by_key[key], n) for key, n in zip(keys_B.tolist(), positions_B.tolist(), strict=True)
        ]
        tokens = [int(text[n]) if n < len(text) else 0 for text, n in at]
        tokens_B = torch.tensor(tokens, device=logits_BV.device)
        return tokens_B, logits_BV.log_softmax(dim=-1).gather(1, tokens_B[:, None])[:, 0]

    engine = EmbeddedEngine(chunks, world, lambda _: "", vocab_size=size, sampler=given)
    prompts = [Prompt("text", "", tuple(prompt))] if texts else []
    read = engine.generate(prompts, sampling, step=0)
    return [each.rollout_logprobs[: len(text)] for each, text in zip(read, texts, strict=True)]
