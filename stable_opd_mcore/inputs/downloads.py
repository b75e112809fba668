"""Model directories in place of hub ids: `student.path`, `teacher.path` and those of
`teacher.models`."""

from pathlib import Path
from typing import TypeVar

from stable_opd_mcore.config.models import TeacherConfig
from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.hub import MODEL_FILES, download, is_hub_id

M = TypeVar("M", bound=ModelConfig)


def with_downloads(config: Config) -> Config:
    """Download the student and the teachers, and set their paths to the directories."""
    return with_download(with_download(config, "student"), "teacher")


def with_download(config: Config, role: str) -> Config:
    """Download the model of a role, and set its path to the directory.

    Raises:
        UserError: a path that is not a model directory, a hub id without a revision, or a failed
            download.
    """
    model: ModelConfig | None = getattr(config, role)
    if model is None:
        return config
    model = _downloaded(role, model)
    if isinstance(model, TeacherConfig):
        named = {k: _downloaded(f"{role}.models.{k}", each) for k, each in model.models.items()}
        model = model.model_copy(update={"models": named})
    return config.model_copy(update={role: model})


def _downloaded(role: str, model: M) -> M:
    """Download the model if its path is a hub id, and set the path to the directory."""
    is_teacher = isinstance(model, TeacherConfig)
    if model.path is None or (is_teacher and model.is_self):
        return model
    if not is_hub_id(model.path):
        if not (is_teacher and model.is_served):
            _require_model_directory(f"{role}.path", Path(model.path))
        return model
    if model.revision is None:
        raise UserError(
            f"{role}.path={model.path}: no such directory here, and no commit to download from the "
            f"hub: set {role}.path to a directory, or {role}.revision to a commit"
        )
    folder, _ = download(model.path, "model", MODEL_FILES, model.revision)
    return model.model_copy(update={"path": str(folder)})


def _require_model_directory(key: str, path: Path) -> None:
    if (path / "config.json").is_file():
        return
    what = "has no config.json" if path.is_dir() else "is a file" if path.exists() else "is absent"
    raise UserError(
        f"{key}={path} {what}; expected a model directory (config.json and safetensors), or a hub "
        f"id owner/name with {key.removesuffix('path')}revision"
    )
