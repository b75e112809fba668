"""Settings of layout, watchdog and cold start that cannot work are refused."""

import pytest

from stable_opd_mcore.config.training import COLLECTIVE_TIMEOUT_MINUTES
from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_of

LONGEST = COLLECTIVE_TIMEOUT_MINUTES / 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("parallel.sequence=true", "parallel.sequence=true with parallel.tensor=1"),
        ("parallel.virtual_pipeline=2", "virtual_pipeline=2 with parallel.pipeline=1"),
        ("parallel.expert=3 parallel.tensor=2", "expert=3 and parallel.tensor=2: one must"),
        ("parallel.tensor=0", "parallel.tensor: Input should be greater than 0"),
        (
            f"fault.watchdog_minutes={LONGEST + 1}",
            r"watchdog_minutes=361 .* time-out of 1440 minutes.* set at most 360, or null",
        ),
        ("optimizer.beta2=1", "optimizer.beta2: Input should be less than 1"),
        ("cold_start.steps=3", "cold_start.lr is required"),
        (
            "teacher.engine=sglang teacher.urls=[http://a:1] fp8.teacher=blockwise",
            "fp8.teacher=blockwise with teacher.engine=sglang",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_of(settings)
