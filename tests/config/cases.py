"""The smallest settings of a run, with sections replaced."""

from typing import Any

from omegaconf import OmegaConf

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config


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


def layered(*overrides: str) -> list[str]:
    """Those that no later one replaces: `load_config` refuses two values of a setting."""
    keys = [override.partition("=")[0] for override in overrides]
    return [
        override
        for number, override in enumerate(overrides)
        if not any(f"{keys[number]}.".startswith(f"{later}.") for later in keys[number + 1 :])
    ]
