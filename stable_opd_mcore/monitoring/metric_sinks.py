"""The sinks of metrics: metrics.jsonl always, others (trackers.py) if configured.

`metrics.jsonl` holds one JSON object per step: "step", then the metrics in sorted order. A mean
over nothing is null. A value that is not finite is null too, because JSON has no NaN;
`"non_finite": {"grad_norm": "nan"}` then names it, and a warning is logged. A resumed run drops the
rows and the guard's events that it will write again, so the file holds them once.

Only rank 0 opens sinks.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.json_files import validated
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.monitoring.trackers import (
    MlflowSink,
    RunSink,
    SwanlabSink,
    TensorBoardSink,
    TrackioSink,
    WandbSink,
)

GUARD_EVENT = "guard"  # a resumed run writes it again
CHANGED_EVENT = "settings_changed"  # a resumed run has accepted changes

logger = logging.getLogger(__name__)


class MetricSinks:
    """All sinks of a run, as one context manager.

    Existing rows from `first_step` on are dropped: 0 in a new run, the checkpoint's step + 1 in a
    resumed one.
    """

    def __init__(self, directory: str | Path, config: Config, first_step: int):
        directory = Path(directory)
        self._jsonl = JsonlSink(RunDirectory(directory).metrics, first_step)
        self._trackers: list[TensorBoardSink | RunSink | MlflowSink] = []
        if config.monitoring.tensorboard:
            self._trackers.append(TensorBoardSink(RunDirectory(directory).tensorboard, first_step))
        if config.monitoring.wandb:
            self._trackers.append(WandbSink(directory, config))
        if config.monitoring.trackio:
            self._trackers.append(TrackioSink(directory, config))
        if config.monitoring.swanlab:
            self._trackers.append(SwanlabSink(directory, config))
        if config.monitoring.mlflow is not None:
            self._trackers.append(MlflowSink(directory, config))

    def write(self, step: int, metrics: Metrics) -> None:
        """Write one row to every sink.

        Raises:
            ValueError: a metric is not listed in metrics.yaml, or the step was written.
        """
        require_known(metrics)
        values = metrics.values_by_key()
        self._jsonl.write(step, values)
        defined = {key: value for key, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.write(step, defined)

    def write_event(self, event: str, step: int, details: Mapping[str, Any]) -> None:
        """Write an event to metrics.jsonl, a line that is not a row of metrics, at `step`."""
        self._jsonl.write_event(event, step, details)

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (self._jsonl, *self._trackers):
            sink.close()


class JsonlSink:
    """Appends one line per step and flushes it, so that a killed run keeps its finished steps.

    Raises:
        UserError: the existing file has a malformed row; the message names file and line.
    """

    def __init__(self, path: str | Path, first_step: int = 0):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = _drop_from(self._path, first_step) if self._path.exists() else -1
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        if step <= self._last_step:
            raise ValueError(f"{self._path}: step {step} after step {self._last_step}")
        non_finite = {
            key: str(value)
            for key, value in values.items()
            if value is not None and not math.isfinite(value)
        }
        row: dict[str, Any] = {"step": step}
        for key in sorted(values):
            row[key] = None if key in non_finite else values[key]
        if non_finite:
            named = ", ".join(f"{key} is {value}" for key, value in sorted(non_finite.items()))
            logger.warning("step %d: %s; written as null", step, named)
            row["non_finite"] = non_finite
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step

    def write_event(self, event: str, step: int, details: Mapping[str, Any]) -> None:
        row = {"event": event, "after_step": step, **details}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, FiniteFloat | None] = Field(init=False)
    step: Annotated[int, Field(ge=0, lt=2**63)]
    non_finite: Any = None


class _Event(BaseModel):
    model_config = ConfigDict(strict=True)
    event: str
    after_step: Annotated[int, Field(ge=0, lt=2**63)]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; see `read_run`."""
    return read_run(path)[0]


def read_run(path: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows and the events of a metrics.jsonl, each in order. An event has "event", "after_step"
    and its details. A last line that a kill cut, or that is being written, is left out.

    Raises:
        UserError: the file is missing, empty or malformed; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the directory of a run that has started")
    lines = [row for _, row in _lines(path)]
    rows = [row for row in lines if "event" not in row]
    if not rows:
        raise UserError(f"{path}: no rows; wait until the run has finished its first step")
    return rows, [row for row in lines if "event" in row]


def _drop_from(path: Path, first_step: int) -> int:
    """Rewrite `path` without the rows of step >= first_step; return the last step, -1 without one.

    Decisions of the guard are dropped like rows, since a resumed run writes them again; other
    events are kept.
    """
    kept = [
        (line, row)
        for line, row in _lines(path)
        if row.get("event", GUARD_EVENT) != GUARD_EVENT
        or row["after_step" if "event" in row else "step"] < first_step
    ]
    text = b"".join(line + b"\n" for line, _ in kept)
    if text != path.read_bytes():
        write_atomically(path, text)
    return max((row["step"] for _, row in kept if "event" not in row), default=-1)


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines with their rows and events, without a last line that is not JSON."""
    found: list[tuple[bytes, dict[str, Any]]] = []
    data, last_step = path.read_bytes(), -1
    lines = data.rstrip(b"\n").split(b"\n") if data.strip() else []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise UserError(f"{where}: not JSON ({error}); remove the line") from error
        if isinstance(row, dict) and "event" in row:
            validated(_Event, row, where)
        else:
            step = validated(_Row, row, where).step
            if step <= last_step:
                raise UserError(f"{where}: step {step} after step {last_step}; remove the line")
            last_step = step
        found.append((line, row))
    return found
