"""The reward's function: its file's hash in the settings."""

import pytest

from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_with


def test_the_hash_of_the_file_is_a_setting_that_another_file_does_not_meet(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def reward(row, response): return 1")
    named = {"function": f"{own}:reward"}
    first = run_with(reward=named).reward
    assert run_with(reward=first.model_dump()).reward == first
    assert first.read().load()({}, "") == 1
    own.write_text("def reward(row, response): return 0")
    assert run_with(reward=named).reward.sha256 != first.sha256
    with pytest.raises(ConfigError, match=r"here: reward: .*own.py: its SHA-256 is"):
        run_with(reward=first.model_dump())
    assert run_with(reward={"sha256": first.sha256}).reward.sha256 is None
