"""Runs that go through the layouts of four ranks, small enough for many of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from tests.train.runs import tiny_config

ROLLOUT = {"prompts_per_step": 5, "samples_per_prompt": 1}  # unequal shares of four ranks


def short_config(directory: Path, name: str, steps: int, **sections: Any) -> Config:
    """A run of five short responses a step."""
    train_section = {"steps": steps, "micro_batch_tokens": 96, **sections.pop("train", {})}
    sections = {"rollout": ROLLOUT, "sampling": {"max_new_tokens": 8}, **sections}
    return tiny_config(directory, name, train=train_section, **sections)


def train_through(
    layouts: Mapping[str, dict[str, Any]],
    config_of: Callable[..., Config],
    directory: Path,
    name: str,
    **sections: Any,
) -> None:
    """Train a step on each layout, resumed from the last one, whose update it shows.

    config_of: a config of directory, name, number of steps and sections.
    """
    recomputing = {"recompute": "full"}
    for steps, parallel in enumerate(layouts.values(), start=1):
        config = config_of(directory, name, steps, parallel=parallel, train=recomputing, **sections)
        train(config, show_progress=False)
