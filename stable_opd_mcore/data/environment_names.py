"""The names by which prompts say which environment plays them."""

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.sources import source_name

OF_THE_RUN = ""  # Prompt.environment where the run's own settings hold, not a source's


def environments_of(config: Config) -> dict[str, EnvironmentConfig]:
    """The environments of a run, by the name that its prompts have for them."""
    named = {source_name(each): each.environment for each in config.data.sources}
    given = {OF_THE_RUN: config.environment, **named}
    return {name: each for name, each in given.items() if each and each.function is not None}


def turns_by_environment(config: Config) -> dict[str | None, int]:
    """The most turns of the episodes of each environment, by its name."""
    return {name: each.max_turns for name, each in environments_of(config).items()}
