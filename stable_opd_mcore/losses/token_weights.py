"""Per-token weights with the global normaliser inside, so that the loss is a plain sum (METHOD
§1-3).

Pure Python over the global list of samples, the same on every rank. Every component has its own
denominator:
    pg   sequence_mean  1 / (sequences * trained tokens of this one)     token_mean  1 / trained
    tokens of all
         constant       1 / (sequences * max_new_tokens)   (Dr.GRPO)
    kl   beta / visited rollout prefixes, masked tokens included: a mask is about advantages, not
    about states sft  lambda / (golden sequences * trained tokens of this one)
"Sequences" are those with at least one trained token. Because sums over ranks and micro-batches of
sum_t w_t f_t give exactly the global mean, no count has to travel with a gradient. Not here: which
tokens are trained.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Sequence
from itertools import repeat
from typing import Literal

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Sample, TokenWeights

Aggregation = Literal["sequence_mean", "token_mean", "constant"]
STD_EPSILON = 1e-6


def token_weights(
    samples: Sequence[Sample],
    *,
    policy: Sequence[bool],
    aggregation: Aggregation,
    max_new_tokens: int,
    beta: float,
    sft_weight: float,
    advantages: Sequence[float] | None = None,
) -> list[TokenWeights]:
    """Weights of every sample, in order.

    Args:
        samples: all samples of the step, of every data-parallel rank.
        policy: per sample, whether it carries the policy term.
        max_new_tokens: the denominator of `constant`.
        beta: weight of the mean KL over rollout prefixes.
        sft_weight: weight of the mean negative log-likelihood over golden solutions.
        advantages: per sample, spread over its tokens; None where the teacher gives them.
    """
    trained = [sum(sample.trained) for sample in samples]
    golden = [sample.source == "golden" for sample in samples]
    policy_sequences = sum(1 for n, on in zip(trained, policy, strict=True) if on and n)
    policy_tokens = sum(n for n, on in zip(trained, policy, strict=True) if on)
    golden_sequences = sum(1 for n, on in zip(trained, golden, strict=True) if on and n)
    prefixes = sum(len(s.response_token_ids) for s in samples if s.source == "rollout")

    weights = []
    for index, sample in enumerate(samples):
        length, count = len(sample.response_token_ids), trained[index]
        pg = sft = 0.0
        if policy[index] and count:
            denominator = {
                "sequence_mean": policy_sequences * count,
                "token_mean": policy_tokens,
                "constant": policy_sequences * max_new_tokens,
            }[aggregation]
            pg = 1.0 / denominator
        if golden[index] and count:
            sft = sft_weight / (golden_sequences * count)
        kl = beta / prefixes if beta and not golden[index] else 0.0
        advantage = None if advantages is None else tuple(repeat(advantages[index], length))
        weights.append(
            TokenWeights(
                pg=_on_trained(pg, sample),
                kl=tuple(repeat(kl, length)),
                sft=_on_trained(sft, sample),
                advantage=advantage,
            )
        )
    return weights


def group_advantages(samples: Sequence[Sample], std_normalise: bool) -> list[float]:
    """Reward minus the mean of its prompt's rollouts, over their sample standard deviation if
    asked (GRPO).

    Golden samples get 0, and so does a group whose rewards are all alike.

    Raises:
        UserError: a rollout without a reward.
    """
    groups: dict[str, list[float]] = {}
    for sample in samples:
        if sample.source == "golden":
            continue
        if sample.reward is None:
            raise UserError(
                f"prompt {sample.prompt_id}: a rollout has no reward, which grpo needs: "
                "grade the rollouts (the data source must give answers)"
            )
        groups.setdefault(sample.prompt_id, []).append(sample.reward)
    centre = {prompt: statistics.fmean(rewards) for prompt, rewards in groups.items()}
    spread = dict.fromkeys(groups, 1.0)
    if std_normalise:
        spread = {
            prompt: (statistics.stdev(rewards) if len(rewards) > 1 else 0.0) + STD_EPSILON
            for prompt, rewards in groups.items()
        }
    return [
        0.0
        if sample.source == "golden" or sample.reward is None
        else (sample.reward - centre[sample.prompt_id]) / spread[sample.prompt_id]
        for sample in samples
    ]


def on_policy_share(samples: Sequence[Sample], fraction: float) -> list[bool]:
    """GKD's lambda: for that share of prompts the rollouts carry the policy term, for the others
    the golden solution.

    Which prompts is drawn by a hash of the prompt and its first rollout, so it changes from step
    to step and is the same on every rank.

    Raises:
        UserError: an off-policy prompt without a golden solution.
    """
    first: dict[str, Sample] = {}
    with_golden = {sample.prompt_id for sample in samples if sample.source == "golden"}
    for sample in samples:
        if sample.source == "rollout":
            first.setdefault(sample.prompt_id, sample)
    ranked = sorted(first, key=lambda prompt: (_draw(first[prompt]), prompt))
    on_policy = set(ranked[: round(fraction * len(ranked))])
    missing = sorted(set(first) - on_policy - with_golden)
    if missing:
        raise UserError(
            f"prompt {missing[0]} has no golden solution to train on off-policy: "
            "set objective.on_policy_fraction=1 or data.train.columns.solution"
        )
    return [(sample.source == "rollout") == (sample.prompt_id in on_policy) for sample in samples]


def _draw(sample: Sample) -> int:
    text = f"{sample.prompt_id}:{','.join(map(str, sample.response_token_ids))}"
    return zlib.crc32(text.encode())


def _on_trained(weight: float, sample: Sample) -> tuple[float, ...]:
    return tuple(weight if on else 0.0 for on in sample.trained)
