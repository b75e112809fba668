"""Settings of the guard that cannot work are refused, with the setting that fixes it."""

import pytest

from stable_opd_mcore.config.load import load_config, save_config
from stable_opd_mcore.errors import ConfigError
from tests.config.test_load import SMOKE

ACT, OFF = "guard.policy=act", "guard.policy=off"
NO_SOLUTIONS = "data.train.columns.solution=null"


@pytest.mark.parametrize(
    ("overrides", "message", "remedies"),
    [
        (
            [ACT, "objective.name=sft", "kl.beta=0", "mixture.lambda=0"],
            "set guard.policy=off",
            [OFF],
        ),
        (
            [ACT, "checkpoint.every=0"],
            "set checkpoint.every or guard.policy=warn",
            ["checkpoint.every=1", "guard.policy=warn"],
        ),
        (
            [ACT, "checkpoint.every=5", "mixture.lambda=0", NO_SOLUTIONS],
            "guard.max_lambda=0",
            ["data.train.columns.solution=solution", "guard.max_lambda=0"],
        ),
    ],
)
def test_settings_that_do_not_fit_the_guard_are_refused(overrides, message, remedies):
    with pytest.raises(ConfigError, match=message):
        load_config(SMOKE, overrides)
    for remedy in remedies:
        load_config(SMOKE, [*overrides, f"++{remedy}"])


def test_bare_off_of_yaml_is_the_policy_off(tmp_path):
    config = load_config(SMOKE, ["guard.policy=off"])
    assert config.guard.policy == "off"
    save_config(config, tmp_path / "stored.yaml")
    assert load_config(tmp_path / "stored.yaml").guard.policy == "off"


def test_largest_loss_weights_are_the_guards_only_where_it_acts():
    def largest(*overrides):
        config = load_config(SMOKE, ["kl.beta=0.02", "mixture.lambda=0.5", *overrides])
        return config.largest_beta, config.largest_lambda

    assert largest("guard.max_beta=3") == (0.02, 0.5)
    acting = (ACT, "checkpoint.every=5")
    assert largest(*acting, "guard.max_beta=3", "guard.max_lambda=4") == (3, 4)
    assert largest(*acting, "guard.max_beta=0", "guard.max_lambda=0") == (0.02, 0.5)
