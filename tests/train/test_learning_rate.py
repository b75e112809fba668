"""The learning rate is a pure function of the step."""

import pytest

from stable_opd_mcore.config.schema import OptimizerConfig
from stable_opd_mcore.train.learning_rate import learning_rate


def curve(num_steps, **settings):
    config = OptimizerConfig(**settings)
    return [learning_rate(step, num_steps, config) for step in range(num_steps)]


def test_warm_up_then_constant():
    assert curve(5, lr=1.0, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_the_minimum_at_the_last_step():
    assert curve(5, lr=1.0, min_lr=0.2, schedule="linear") == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_decay_is_halfway_in_the_middle():
    rates = curve(7, lr=1.0, schedule="cosine", warmup_steps=2)
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == 1.0
    assert rates[4] == pytest.approx(0.5)
    assert rates[6] == pytest.approx(0.0)
