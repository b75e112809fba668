"""Stored parts: what a killed evaluation finds again, and what it refuses."""

import pytest

from stable_opd_mcore.commands.evaluate.store import ResponseStore
from stable_opd_mcore.data.rollout_files import write_rollouts
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Prompt, Rollout

IDENTITY = {"weights": "abc", "sampling": {"stop_token_ids": (1, 2), "temperature": 0.6}}


def rollouts(*names):
    return [
        Rollout(Prompt(name, "1+1", (5,), answer="2"), 0, (7,), (-0.5,), "stop", 0, "2", 1.0)
        for name in names
    ]


def test_an_evaluation_goes_on_after_the_parts_before_the_first_gap(tmp_path):
    store = ResponseStore(tmp_path / "amc", IDENTITY)
    assert store.open() == 0
    write_rollouts(store.path(0), rollouts("s:0", "s:1"))
    write_rollouts(store.path(1), rollouts("s:2"))
    again = ResponseStore(tmp_path / "amc", IDENTITY)
    assert again.open() == 2
    assert list(again.rollouts()) == rollouts("s:0", "s:1", "s:2")
    write_rollouts(again.path(3), rollouts("s:9"))
    assert again.open() == 2


def test_responses_of_other_weights_or_settings_are_refused(tmp_path):
    ResponseStore(tmp_path, IDENTITY).open()
    with pytest.raises(UserError, match=r"have weights 'abc', this evaluation 'd'; give run\.name"):
        ResponseStore(tmp_path, IDENTITY | {"weights": "d"}).open()
    assert ResponseStore(tmp_path / "NAME", IDENTITY | {"weights": "d"}).open() == 0
    (tmp_path / "identity.json").write_text("[")
    with pytest.raises(UserError, match=r"identity\.json: not valid JSON"):
        ResponseStore(tmp_path, IDENTITY).open()
