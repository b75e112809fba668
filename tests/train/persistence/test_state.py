"""The counters of the release before."""

import json

import pytest

from stable_opd_mcore.train.persistence.state import without_exchanged_prompts


def test_a_state_of_the_release_before_is_read_unless_its_steps_have_exchanged_prompts():
    def read(**more: object) -> object:
        record = {"state": {"step": 3} | more, "format": 2}
        return json.loads(without_exchanged_prompts(json.dumps(record).encode()))

    assert read() == read(late=[], early=[]) == {"state": {"step": 3}, "format": 2}
    with pytest.raises(ValueError, match=r"prompts \[15\] .* finish the run with the release"):
        read(late=[15], early=[18])
