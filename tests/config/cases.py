"""The smallest settings of a run, with sections replaced."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError

GOLDEN_ALL = (
    "data.train.path=a data.train.columns.messages=m data.train.columns.answer=null "
    "data.train.columns.golden=all"
)
SERVED = "teacher.engine=sglang teacher.urls=[http://a:1]"


def run_with(**sections: Any) -> Config:
    """A run of a random student on the arithmetic task, with these sections."""
    return parse_config(
        {
            "run": {"name": "r"},
            "student": {"architecture": {}},
            "tokenizer": {"path": "synthetic"},
            "data": {"train": {"path": "synthetic:arithmetic"}},
        }
        | sections,
        origin="here",
    )


def run_of(settings: str) -> Config:
    """As `run_with`, from overrides with spaces between them."""
    sections = OmegaConf.to_container(OmegaConf.from_dotlist(settings.split()))
    return run_with(**sections)


def refused_until(settings: str, message: str, remedies: str) -> None:
    """Settings are refused, and each of the remedies, with | between them, makes them a run. The
    values of a remedy replace those of the settings; one with - before it is dropped."""
    with pytest.raises(ConfigError, match=message):
        run_of(settings)
    for remedy in remedies.split("|"):
        changes = [each.partition("=")[0].removeprefix("-") for each in remedy.split()]
        kept = [each for each in settings.split() if each.partition("=")[0] not in changes]
        run_of(" ".join([*kept, *(each for each in remedy.split() if each[0] != "-")]))


def layered(*overrides: str) -> list[str]:
    """Those that no later one replaces: `load_config` refuses two values of a setting."""
    keys = [override.partition("=")[0] for override in overrides]
    return [
        override
        for number, override in enumerate(overrides)
        if not any(f"{keys[number]}.".startswith(f"{later}.") for later in keys[number + 1 :])
    ]
