"""The limit of open files: raised as far as it is needed, refused where it cannot be."""

import resource

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.open_files import require_open_files


@pytest.fixture
def limit(monkeypatch):
    """Stands for the process's limit, [soft, hard]."""
    held = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(held))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: held.__setitem__(slice(2), new))
    return held


@pytest.mark.parametrize(("number", "soft"), [(1000, 1024), (1024, 1024), (4096, 4096)])
def test_the_soft_limit_is_raised_to_what_is_needed(limit, number, soft):
    require_open_files(number, "5 servers")
    assert limit == [soft, 4096]


def test_a_hard_limit_below_it_is_refused_with_both_numbers(limit):
    with pytest.raises(UserError, match=r"5 servers need up to 4097 .* has a hard limit of 4096"):
        require_open_files(4097, "5 servers")
    assert limit == [1024, 4096]


def test_a_process_without_a_limit_is_left_alone(limit):
    limit[:] = [resource.RLIM_INFINITY] * 2
    require_open_files(10**6, "5 servers")
    assert limit == [resource.RLIM_INFINITY] * 2
