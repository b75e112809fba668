"""Sinks other than metrics.jsonl: TensorBoard, Weights & Biases, Trackio, SwanLab, MLflow.

Each writes the defined values of its rows. All but TensorBoard are packages of their own, which
`pip install -e '.[trackers]'` adds; a run that asks for a missing one is refused. Their
id of the run is kept in the run directory (`wandb_id`, `mlflow_id`, ...), so that a resumed run
continues in the same place.

A resumed run repeats the steps after its checkpoint. TensorBoard forgets the earlier values, MLflow
and Trackio keep both, Weights & Biases keeps the first, and without a network SwanLab writes a
second folder with the same id. Only metrics.jsonl holds every step exactly once.
"""

# The trackers' packages are not installed where types are checked.
# pyright: reportMissingImports=false

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.changes import by_dotted_key
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.inputs.loading import missing_tracker

PROJECT = "stable-opd"  # where the variables of wandb and mlflow name no other
MLFLOW_BATCH = 100  # settings that one request may hold
MLFLOW_CHARACTERS = 500  # one setting may have


class TensorBoardSink:
    """Scalars under their keys. A resumed run purges later steps."""

    def __init__(self, directory: str | Path, first_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class RunSink:
    """A run of a package with the interface of Weights & Biases: `init` gives a run, which has
    `log` and `finish`. A subclass opens the run; then its id is kept."""

    def __init__(self, run: Any, path: Path, name: str):
        self._run = run
        write_atomically(path, f"{name}\n".encode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbSink(RunSink):
    """A run of Weights & Biases, whose own settings hold the account and whether it is offline."""

    def __init__(self, directory: Path, config: Config):
        try:
            import wandb
        except ImportError as error:
            raise missing_tracker("wandb") from error
        path = RunDirectory(directory).wandb_id
        name = _kept_id(path)
        try:
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=config.run.name,
                id=name,
                resume="allow",
                dir=str(directory),
                config=_settings_of(config),
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:  # no account, no such project, no network
            raise UserError(
                f"Weights & Biases refuses the run: {error}. Log in with `wandb login`, set "
                "WANDB_MODE=offline, or set monitoring.wandb=false"
            ) from error
        super().__init__(run, path, name)


class TrackioSink(RunSink):
    """A run of Trackio: on this machine, or where its own variables say (TRACKIO_SPACE_ID).

    Trackio resumes by name, so the name has an id in it.
    """

    def __init__(self, directory: Path, config: Config):
        try:
            import trackio
        except ImportError as error:
            raise missing_tracker("trackio") from error
        path = RunDirectory(directory).trackio_id
        name = _kept_id(path)
        try:
            run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=f"{config.run.name}-{name}",
                resume="allow",
                config=_settings_of(config),
                embed=False,
            )
        except ValueError as error:  # a project's name or a server's address
            raise UserError(
                f"Trackio refuses the run: {error}. Change its TRACKIO_* variables, or set "
                "monitoring.trackio=false"
            ) from error
        super().__init__(run, path, name)


class SwanlabSink(RunSink):
    """A run of SwanLab, whose own variables hold the account and whether it is offline."""

    def __init__(self, directory: Path, config: Config):
        try:
            import swanlab
            from swanlab.exceptions import AuthenticationError
        except ImportError as error:
            raise missing_tracker("swanlab") from error
        path = RunDirectory(directory).swanlab_id
        name = _kept_id(path)
        (directory / "swanlab").mkdir(exist_ok=True)
        try:
            run = swanlab.init(
                project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
                name=config.run.name,
                id=name,
                resume="allow",
                log_dir=str(directory / "swanlab"),
                config=_settings_of(config),
            )
        # no account, no such project, no network: its ApiError is an OSError
        except (RuntimeError, ValueError, OSError, AuthenticationError) as error:
            raise UserError(
                f"SwanLab refuses the run: {error}. Set SWANLAB_API_KEY or SWANLAB_MODE=offline, "
                "or set monitoring.swanlab=false"
            ) from error
        super().__init__(run, path, name)


class MlflowSink:
    """A run of the MLflow server or database at `monitoring.mlflow`.

    The settings are those of the run's first start: MLflow lets none change.
    """

    def __init__(self, directory: Path, config: Config):
        try:
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing_tracker("mlflow") from error
        self._metric, address = Metric, config.monitoring.mlflow
        path = RunDirectory(directory).mlflow_id
        try:
            self._client = MlflowClient(tracking_uri=address)
            if path.is_file():
                self._id = path.read_text().strip()
                self._client.update_run(self._id, status="RUNNING")
                return
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            run = self._client.create_run(experiment, run_name=config.run.name)
            self._id: str = run.info.run_id
            settings = [
                Param(key, str(value)[:MLFLOW_CHARACTERS])
                for key, value in by_dotted_key(_settings_of(config)).items()
            ]
            for begin in range(0, len(settings), MLFLOW_BATCH):
                self._client.log_batch(self._id, params=settings[begin : begin + MLFLOW_BATCH])
        except MlflowException as error:
            raise UserError(
                f"monitoring.mlflow={address}: {error}. Give the address of a server, such as "
                "http://HOST:5000, or a database, such as sqlite:///mlflow.db"
            ) from error
        write_atomically(path, f"{self._id}\n".encode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _settings_of(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _kept_id(path: Path) -> str:
    """The tracker's id of the run in this file, else a new one."""
    return path.read_text().strip() if path.is_file() else uuid.uuid4().hex[:12]
