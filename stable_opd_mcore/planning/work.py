"""Sequences and tokens of a step, and of a micro-batch of one rank.

Not here: what they take in memory (memory.py) or time (seconds.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.planning.layout import Layout


@dataclass(frozen=True)
class Work:
    """Lengths and counts of one step that the config does not fix."""

    prompt_tokens: int = 256  # mean
    response_tokens: int = 4096  # mean, of rollouts and golden solutions

    def sequences(self, config: Config) -> int:
        """Rollouts and golden solutions of one step, over all ranks."""
        prompts = config.rollout.prompts_per_step
        golden = prompts if config.largest_lambda > 0 or config.objective.name == "sft" else 0
        drawn = 0 if config.objective.name == "sft" else prompts * config.rollout.samples_per_prompt
        return drawn + golden

    def trained_tokens(self, config: Config) -> int:
        """Prompt and response tokens of one step, over all ranks."""
        return self.sequences(config) * (self.prompt_tokens + self.response_tokens)

    def scored_rows(self, config: Config) -> int:
        """Response tokens of one step, over all ranks."""
        return self.sequences(config) * self.response_tokens


def largest_share(config: Config, layout: Layout, work: Work) -> int:
    """Tokens of one rank in one minibatch, at least the longest sequence, up to 1,024 more."""
    longest = work.prompt_tokens + config.sampling.max_new_tokens
    tokens = _sequences(config, layout, work) * (work.prompt_tokens + work.response_tokens)
    return 1024 * math.ceil(max(tokens, longest) / 1024)


def micro_batch_tokens(config: Config, layout: Layout, work: Work) -> float:
    """Tokens of the largest micro-batch: a sequence longer than the budget stands alone."""
    longest = work.prompt_tokens + config.sampling.max_new_tokens
    budget = max(config.train.micro_batch_tokens, longest)
    length = work.prompt_tokens + work.response_tokens
    return min(budget, _sequences(config, layout, work) * length)


def _sequences(config: Config, layout: Layout, work: Work) -> int:
    """Of one data-parallel rank and one minibatch."""
    return math.ceil(work.sequences(config) / layout.data / config.train.minibatches)


def num_micro_batches(config: Config, layout: Layout, work: Work) -> int:
    """Of one data-parallel rank and one optimizer step."""
    tokens = work.trained_tokens(config) / layout.data / config.train.minibatches
    return max(1, round(tokens / micro_batch_tokens(config, layout, work)))
