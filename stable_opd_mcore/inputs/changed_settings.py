"""Settings and files that differ from those of a run directory's checkpoints."""

from typing import Any

from stable_opd_mcore.config.changes import changes, read_settings
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.run_directory import ANY_STEP
from stable_opd_mcore.inputs.hashes import changed_inputs


def settings_changes(config: Config, accepted: bool) -> dict[str, tuple[Any, Any]]:
    """Settings, and contents of files, that differ from those with which the run directory's
    checkpoints were trained.

    Empty without checkpoints: the run then starts from the beginning.

    Raises:
        ConfigError: there are some, and they are not `accepted`.
    """
    files = config.run.files
    stored = files.resolved
    if not any(files.checkpoints.glob(ANY_STEP)):
        return {}
    if not stored.is_file():
        if accepted:
            return {}
        raise ConfigError(
            f"{files.path} has checkpoints but no {stored.name}, so the settings and files that "
            "they were trained with are not known: restore it, start a new run with another "
            "run.name, or resume with the settings of the command line: --accept-changes"
        )
    differences = changes(read_settings(stored), config) | changed_inputs(config)
    if differences and not accepted:
        lines = "\n".join(f"  {key}: {old} -> {new}" for key, (old, new) in differences.items())
        raise ConfigError(
            f"{files.path} was trained with other settings or files "
            f"({stored}, {files.inputs.name}):\n{lines}\n"
            "Set them back, start a new run with another run.name, or resume with the new ones: "
            "--accept-changes"
        )
    return differences
