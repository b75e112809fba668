"""Adaptive weights against hand-computed steps, and a loop that they must bring to its target."""

import pytest

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.train.loss_weights import Adapted, adapt, loss_weights_of
from stable_opd_mcore.train.oversight.guard import GuardState
from tests.config.cases import layered
from tests.config.test_load import SMOKE


def config_of(*overrides):
    return load_config(SMOKE, layered("kl.beta=0.1", "mixture.lambda=0.5", *overrides))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.2, 0.1),  # target reached
        (0.22, 0.1 * 1.01),  # 10 % above
        (0.19, 0.1 * 0.995),
        (9.0, 0.1 * 1.02),  # an error counts up to 20 %
        (0.0, 0.1 * 0.98),
        (None, 0.1),
    ],
)
def test_beta_moves_by_a_share_of_its_relative_error(measured, expected):
    config = config_of("kl.target=0.2")
    adapted = adapt(config, Adapted(), {"kl/reference": measured})
    assert adapted == Adapted(beta=pytest.approx(expected))
    assert loss_weights_of(config, adapted, GuardState()).beta == pytest.approx(expected)


def test_lambda_follows_the_negative_log_likelihood_of_golden_solutions():
    config = config_of("mixture.target=0.5")
    adapted = adapt(config, Adapted(), {"logprob/golden": -0.55})
    assert adapted == Adapted(lambda_=pytest.approx(0.5 * 1.01))
    assert loss_weights_of(config, adapted, GuardState()).lambda_ == pytest.approx(0.505)
    assert adapt(config, adapted, {}) == adapted


def test_weights_stay_in_their_range():
    config = config_of("kl.target=0.2")
    high = low = Adapted()
    for _ in range(300):
        high = adapt(config, high, {"kl/reference": 9.0})
        low = adapt(config, low, {"kl/reference": 0.0})
    assert (high.beta, low.beta) == (pytest.approx(1.0), pytest.approx(0.01))
    lower = config_of("kl.target=0.2", "kl.beta=0.05")  # resumed with other settings
    assert loss_weights_of(lower, high, GuardState()).beta == pytest.approx(0.5)
    assert loss_weights_of(config_of(), high, GuardState()).beta == 0.1
    assert adapt(config_of(), high, {"kl/reference": 9.0}) == Adapted()


def test_a_loop_whose_kl_falls_with_beta_reaches_its_target():
    config, adapted = config_of("kl.target=0.2"), Adapted()
    for _ in range(300):
        beta = loss_weights_of(config, adapted, GuardState()).beta
        adapted = adapt(config, adapted, {"kl/reference": 0.06 / beta})
    assert 0.06 / loss_weights_of(config, adapted, GuardState()).beta == pytest.approx(
        0.2, rel=0.01
    )


def test_the_guard_only_strengthens():
    acting = ["guard.policy=act", "checkpoint.every=5", "kl.target=0.2"]
    guard = GuardState(measure="raised", beta=0.15, lambda_=0.3)
    now = loss_weights_of(config_of(*acting), Adapted(beta=0.12), guard)
    assert (now.beta, now.lambda_) == (0.15, 0.5)
    assert loss_weights_of(config_of(*acting), Adapted(beta=0.2), GuardState(beta=0.15)).beta == 0.2
    assert loss_weights_of(config_of(), Adapted(), guard).beta == 0.1


@pytest.mark.parametrize("section", ["kl", "mixture"])
def test_a_target_needs_a_weight_to_start_from(section):
    with pytest.raises(ConfigError, match=rf"{section}\.target=0\.3 with {section}\.\w+=0"):
        load_config(SMOKE, ["kl.beta=0", "mixture.lambda=0", f"{section}.target=0.3"])
