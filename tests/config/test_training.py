"""Settings of layout, watchdog and cold start that cannot work are refused."""

import pytest

from stable_opd_mcore.config.training import COLLECTIVE_TIMEOUT_MINUTES
from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_with

LONGEST = COLLECTIVE_TIMEOUT_MINUTES / 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"sequence": True}}, "parallel.sequence=true needs parallel.tensor > 1"),
        ({"parallel": {"virtual_pipeline": 2}}, "virtual_pipeline needs parallel.pipeline > 1"),
        ({"parallel": {"expert": 2}}, "parallel.expert=2 is not supported yet: set it to 1"),
        ({"parallel": {"tensor": 0}}, "parallel.tensor: Input should be greater than 0"),
        (
            {"fault": {"watchdog_minutes": LONGEST + 1}},
            r"watchdog_minutes=361 .* time-out of 1440 minutes.* set at most 360, or null",
        ),
        ({"optimizer": {"beta2": 1}}, "optimizer.beta2: Input should be less than 1"),
        ({"cold_start": {"steps": 3}}, "cold_start.lr is required"),
    ],
)
def test_settings_that_cannot_work_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        run_with(**sections)


def test_layouts_that_need_each_other_are_accepted_together():
    layout = {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 3}
    found = run_with(parallel=layout).parallel
    assert {key: getattr(found, key) for key in layout} == layout


def test_the_watchdog_ends_a_hang_long_before_the_collectives_time_out():
    assert run_with(fault={"watchdog_minutes": LONGEST}).fault.watchdog_minutes == LONGEST
    assert run_with().fault.watchdog_minutes < LONGEST
    assert run_with(fault={"watchdog_minutes": None}).fault.watchdog_minutes is None
