"""The responses to held-out problems: how many are right, their rates and sampling settings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.responses import ONE_TURN, rollout_metrics
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.estimates import bootstrap_interval, pass_at_k
from stable_opd_mcore.records import Prompt, Rollout, Sampling

SAMPLES_PER_PART = 1024  # responses that are stored together; an evaluation resumes between parts


@dataclass(frozen=True)
class BenchmarkResult:
    num_samples: int  # k
    num_correct: tuple[int, ...]  # right responses of each problem, in the problems' order
    num_over_long: int = 0  # problems without a response, counted as wrong
    # Sum of each problem's rewards; (): num_correct. A reward may be any finite number.
    rewards: tuple[float, ...] = ()
    has_verdicts: bool = True  # no reward is outside [0, 1], and 1 is right; else no pass@k
    # Truncation, repetition, lengths, ... by name, as in data/responses.py; None: not defined.
    rates: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def shares(self) -> tuple[float, ...]:
        """The mean reward of each problem: the share of right responses where it is 0 or 1."""
        return tuple(reward / self.num_samples for reward in self.rewards or self.num_correct)

    @property
    def accuracy(self) -> float:
        """avg@k: the mean share. Where rewards are 0 or 1, an unbiased estimate of pass@1."""
        return sum(self.shares) / len(self.shares)

    @property
    def accuracy_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval over problems."""
        return bootstrap_interval([self.shares])

    def pass_at(self, k: int) -> tuple[float, tuple[float, float]]:
        """The unbiased estimate of pass@k, averaged over problems, and its 95 % interval."""
        estimates = [pass_at_k(self.num_samples, correct, k) for correct in self.num_correct]
        return sum(estimates) / len(estimates), bootstrap_interval([estimates])

    def record(self) -> dict[str, Any]:
        """The plain values: rates as shares, intervals as [low, high]."""
        low, high = self.accuracy_interval
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < self.num_samples] + [self.num_samples]
        pass_at = {str(k): self.pass_at(k) for k in ks if self.has_verdicts}
        return {
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "num_problems": len(self.num_correct),
            "num_samples": self.num_samples,
            "num_over_long": self.num_over_long,
            "pass_at": {k: estimate for k, (estimate, _) in pass_at.items()},
            "pass_at_interval": {k: list(interval) for k, (_, interval) in pass_at.items()},
            **({"num_correct": list(self.num_correct)} if self.has_verdicts else {}),
            **self.rates,
        }


def average(results: Mapping[str, BenchmarkResult]) -> tuple[float, tuple[float, float]]:
    """The unweighted mean accuracy of several benchmarks, and its 95 % bootstrap interval."""
    mean = sum(result.accuracy for result in results.values()) / len(results)
    return mean, bootstrap_interval([result.shares for result in results.values()])


def require_answers(prompts: Sequence[Prompt]) -> None:
    """Raise a UserError where there are no prompts, or one has neither a gold answer nor an
    environment."""
    unknown = (each for each in prompts if each.answer is None and each.environment is None)
    missing = next((prompt.prompt_id for prompt in unknown), None)
    if missing is not None or not prompts:
        what = f"{missing}: no gold answer" if prompts else "no held-out prompts"
        raise UserError(f"{what}; set data.eval.path and data.eval.columns.answer")


def benchmark_result(
    rollouts: Iterable[Rollout],
    sampling: Sampling,
    over_long: int = 0,
    max_turns: Mapping[str | None, int] = ONE_TURN,
) -> BenchmarkResult:
    """The result of graded responses, which are read once; the over-long problems come last.

    max_turns: of the episodes of each environment that plays them; see `rollout_metrics`.
    """
    correct: dict[str, int] = {}
    rewards: dict[str, float] = {}
    lowest, highest = 0.0, 1.0

    def counted() -> Iterator[Rollout]:
        nonlocal lowest, highest
        for rollout in rollouts:
            prompt_id = rollout.prompt.prompt_id
            correct[prompt_id] = correct.get(prompt_id, 0) + (rollout.reward == 1.0)
            reward = rollout.reward or 0.0
            rewards[prompt_id] = rewards.get(prompt_id, 0.0) + reward
            lowest, highest = min(lowest, reward), max(highest, reward)
            yield rollout

    metrics = rollout_metrics(counted(), sampling.max_new_tokens, "eval", max_turns)
    rates = {key.removeprefix("eval/"): value for key, value in metrics.values_by_key().items()}
    del rates["accuracy"]  # the over-long problems count as wrong in ours
    num_correct = (*correct.values(), *[0] * over_long)
    sums = (*rewards.values(), *[lowest * sampling.num_samples] * over_long)
    has_verdicts = (lowest, highest) == (0, 1)
    return BenchmarkResult(sampling.num_samples, num_correct, over_long, sums, has_verdicts, rates)


def evaluation_sampling(
    config: Config, stop_token_ids: Sequence[int], *, greedy: bool = False, num_samples: int = 1
) -> Sampling:
    """The sampling settings of held-out responses; greedy: one response per prompt.
    `num_samples` is the number of responses per prompt if `evaluation.num_samples` is not set.
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
