"""What follows from several sections of a run, and its name."""

import pytest

from stable_opd_mcore.config.training import LONGEST_WAIT_MINUTES
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.serving import timeouts
from tests.config.cases import run_with


def test_colocated_servers_have_everything_offloaded_unless_told_otherwise():
    colocated = {"engine": "sglang", "sglang": {"placement": "colocated"}}
    everything = ("student", "optimizer", "gradients", "frozen")
    assert run_with(rollout=colocated).offloaded == everything
    assert run_with(rollout=colocated, memory={"offload": []}).offloaded == ()
    assert run_with(rollout={"engine": "sglang"}).offloaded == ()
    assert run_with(memory={"offload": ["frozen"]}).offloaded == ("frozen",)


def test_the_watchdog_waits_longer_than_any_wait_for_servers():
    teacher = timeouts.TEACHER_PATIENCE + timeouts.SCORE
    longest = max(timeouts.START, timeouts.REQUEST, timeouts.BUCKET, teacher)
    assert longest <= 60 * LONGEST_WAIT_MINUTES
    for minutes in (LONGEST_WAIT_MINUTES + 1, None):
        run_with(rollout={"engine": "sglang"}, fault={"watchdog_minutes": minutes})


@pytest.mark.parametrize("name", ["../up", "", ".hidden", "a/b", "a b", "-x"])
def test_a_name_that_is_no_directory_of_its_own_is_refused(name):
    with pytest.raises(ConfigError, match=r"run\.name: String should match pattern"):
        run_with(run={"name": name})
