"""Settings that are gone: accepted where they ask for what still holds, else refused by name."""

from pathlib import Path

import pytest

from stable_opd_mcore.config import removed
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.removed import Removed, without_removed
from stable_opd_mcore.errors import ConfigError

SMOKE = Path(__file__).parents[2] / "configs" / "smoke_cpu.yaml"
_ROWS = {
    "train.speed": Removed(("fast", None), "drop the key"),
    "data.train.colour": Removed((), "use data.train.weight"),
    "reward.sha256": Removed(None, ""),
}


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    monkeypatch.setattr(removed, "REMOVED", _ROWS)


def test_what_still_holds_is_dropped_and_the_values_given_stay_as_they_are():
    given = {"train": {"speed": "fast", "steps": 3}, "data": {"train": [{"path": "a"}]}}
    given["reward"] = {"sha256": "any value"}
    assert without_removed(given, "f") == {
        "train": {"steps": 3},
        "data": {"train": [{"path": "a"}]},
        "reward": {},
    }
    assert given["train"] == {"speed": "fast", "steps": 3}


def test_anything_else_is_refused_with_its_key_origin_and_remedy():
    values = {"train": {"speed": "slow"}, "data": {"train": [{"colour": 1}, {"path": "a"}]}}
    with pytest.raises(ConfigError) as error:
        without_removed(values, "file.yaml", ["train.speed=slow"])
    assert str(error.value) == (
        "override 'train.speed=slow': train.speed='slow' is gone; drop the key\n"
        "file.yaml: data.train.colour=1 is gone; use data.train.weight"
    )


def test_a_config_file_is_read_without_them(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"base: {SMOKE}\ntrain: {{speed: fast}}\n")
    assert load_config(config) == load_config(SMOKE)
    with pytest.raises(ConfigError, match=r"^override 'train\.speed=slow': train\.speed"):
        load_config(config, ["train.speed=slow"])
