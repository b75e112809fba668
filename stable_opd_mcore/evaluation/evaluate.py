"""One evaluation: sample responses to held-out prompts, grade them, count.

How responses are sampled and graded is an argument, so the same function serves the training loop
on any layout and the command line. Not here: the prompts (benchmarks.py, data/prompts.py) and the
health metrics of the responses (monitoring/health.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.rollout.engine import Sampling


@dataclass(frozen=True)
class PromptResult:
    """The k responses to one prompt."""

    prompt_id: str
    num_samples: int
    num_correct: int
    num_truncated: int
    num_repetitive: int
    num_tokens: int  # of all its responses, stop tokens included


@dataclass(frozen=True)
class EvaluationResult:
    """Sums over prompts; every rate is over all responses, so accuracy is avg@k."""

    prompts: tuple[PromptResult, ...]  # in the order of the prompts
    rollouts: tuple[Rollout, ...]  # graded, k per prompt

    @property
    def num_samples(self) -> int:
        return sum(prompt.num_samples for prompt in self.prompts)

    @property
    def samples_per_prompt(self) -> int:
        return self.num_samples // len(self.prompts)

    @property
    def accuracy(self) -> float:
        return sum(prompt.num_correct for prompt in self.prompts) / self.num_samples

    @property
    def accuracy_interval(self) -> tuple[float, float]:
        """95 % Wilson interval over prompts; conservative for k > 1 samples per prompt."""
        return wilson_interval(self.accuracy, len(self.prompts))

    @property
    def truncation_rate(self) -> float:
        return sum(prompt.num_truncated for prompt in self.prompts) / self.num_samples

    @property
    def repetition_rate(self) -> float:
        return sum(prompt.num_repetitive for prompt in self.prompts) / self.num_samples

    @property
    def response_length_mean(self) -> float:
        return sum(prompt.num_tokens for prompt in self.prompts) / self.num_samples


def evaluate(
    draw: Callable[[Sequence[Prompt]], list[Rollout]],
    prompts: Sequence[Prompt],
    *,
    is_repetitive: Callable[[str], bool],
    prompts_per_batch: int = 64,
) -> EvaluationResult:
    """Sample, grade and count; the result is the same on every rank.

    Args:
        draw: prompts to their graded rollouts, k per prompt, in the order of the prompts; the same
            list on every rank.
        prompts_per_batch: prompts given to `draw` at once.

    Raises:
        UserError: no prompts, or one without a gold answer.
    """
    missing = next((prompt.prompt_id for prompt in prompts if prompt.answer is None), None)
    if missing is not None or not prompts:
        what = f"{missing}: no gold answer" if prompts else "no held-out prompts"
        raise UserError(f"{what}; set data.eval.path and data.eval.columns.answer")
    rollouts: list[Rollout] = []
    for start in range(0, len(prompts), prompts_per_batch):
        rollouts.extend(draw(prompts[start : start + prompts_per_batch]))
    k = len(rollouts) // len(prompts)
    return EvaluationResult(
        prompts=tuple(
            _count(prompt, rollouts[place * k : (place + 1) * k], is_repetitive)
            for place, prompt in enumerate(prompts)
        ),
        rollouts=tuple(rollouts),
    )


def evaluation_sampling(
    config: Config, stop_token_ids: Sequence[int], *, greedy: bool = False, num_samples: int = 1
) -> Sampling:
    """The sampling settings of held-out responses; greedy: one response per prompt.

    Args:
        num_samples: responses per prompt if `evaluation.num_samples` is not set.
    """
    settings = config.evaluation
    is_greedy = greedy or settings.temperature == 0
    return Sampling(
        temperature=0.0 if is_greedy else settings.temperature,
        top_p=1.0 if is_greedy else settings.top_p,
        max_new_tokens=settings.max_new_tokens or config.sampling.max_new_tokens,
        num_samples=1 if is_greedy else settings.num_samples or num_samples,
        stop_token_ids=tuple(stop_token_ids),
        seed=config.train.seed,
    )


def wilson_interval(rate: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share `rate` among `count` independent trials."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = rate + z * z / (2 * count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _count(
    prompt: Prompt, responses: Sequence[Rollout], is_repetitive: Callable[[str], bool]
) -> PromptResult:
    assert all(rollout.prompt.prompt_id == prompt.prompt_id for rollout in responses)
    return PromptResult(
        prompt_id=prompt.prompt_id,
        num_samples=len(responses),
        num_correct=sum(rollout.reward == 1.0 for rollout in responses),
        num_truncated=sum(rollout.finish_reason == "length" for rollout in responses),
        num_repetitive=sum(is_repetitive(rollout.text) for rollout in responses),
        num_tokens=sum(len(rollout.token_ids) for rollout in responses),
    )
