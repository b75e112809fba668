"""Estimates from graded responses: pass@k, and intervals of means by the bootstrap."""

from collections.abc import Sequence
from math import comb

import numpy as np

RESAMPLES = 10_000
_BLOCK = 500  # resamples at once


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of k responses is right, if c of n sampled ones are.

    1 - C(n - c, k) / C(n, k): unbiased (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def bootstrap_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % percentile interval of the unweighted mean over groups of each group's mean.

    A group holds one value per problem, the mean over its responses. Problems are resampled within
    each group, with a fixed seed. Responses are not, since they are not independent problems.
    """
    generator = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for values in groups:
        array = np.asarray(values, dtype=np.float64)
        for start in range(0, RESAMPLES, _BLOCK):
            chosen = generator.integers(0, len(array), (_BLOCK, len(array)))
            means[start : start + _BLOCK] += array[chosen].mean(axis=1) / len(groups)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
