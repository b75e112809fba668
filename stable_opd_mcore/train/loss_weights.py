"""Beta and lambda of a step: the config's, adapted to targets, or the guard's if stronger.

With `kl.target` or `mixture.target` the weight moves after each step so that its metric stays near
the target (docs/method.md §10). All of it is pure functions; the adapted values are part of the
checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stable_opd_mcore.config.objective_settings import AdaptiveSection
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.train.oversight.guard import GuardState

LARGEST_ERROR = 0.2  # relative distance from the target that one step answers to
RATE = 0.1  # a step changes the weight by this share of the relative error
RANGE = 10.0  # the weight stays between the configured one divided by this and times this


@dataclass(frozen=True)
class Adapted:
    """Weights as they have moved; None: not yet, the config's value holds."""

    beta: float | None = None
    lambda_: float | None = None


@dataclass(frozen=True)
class LossWeights:
    beta: float
    lambda_: float


def loss_weights_of(config: Config, adapted: Adapted, guard: GuardState) -> LossWeights:
    """The step's values from the state before it."""
    beta = _start(config.kl, config.kl.beta, adapted.beta)
    lambda_ = _start(config.mixture, config.mixture.lambda_, adapted.lambda_)
    if config.guard.acts:
        beta, lambda_ = max(beta, guard.beta), max(lambda_, guard.lambda_)
    return LossWeights(beta, lambda_)


def adapt(config: Config, adapted: Adapted, values: Mapping[str, float | None]) -> Adapted:
    """The weights after a step with these metrics, which are the same on every rank."""
    golden = values.get("logprob/golden")
    return Adapted(
        beta=_moved(config.kl, config.kl.beta, adapted.beta, values.get("kl/reference")),
        lambda_=_moved(
            config.mixture,
            config.mixture.lambda_,
            adapted.lambda_,
            None if golden is None else -golden,
        ),
    )


def _start(section: AdaptiveSection, configured: float, adapted: float | None) -> float:
    if section.target is None or adapted is None:
        return configured
    return min(max(adapted, configured / RANGE), configured * RANGE)


def _moved(
    section: AdaptiveSection, configured: float, adapted: float | None, measured: float | None
) -> float | None:
    if section.target is None:
        return None
    weight = _start(section, configured, adapted)
    if measured is None:  # the step has no such metric: nothing to compare
        return weight
    error = min(max(measured / section.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return _start(section, configured, weight * (1 + RATE * error))
