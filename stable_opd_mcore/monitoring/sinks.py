"""The sinks of metrics: metrics.jsonl always, others (trackers.py) if configured.

`metrics.jsonl` holds one JSON object per step: "step", then the metrics in sorted order. A mean
over nothing is null. A value that is not finite is null too, because JSON has no NaN;
`"non_finite": {"grad_norm": "nan"}` then names it, and a warning is logged. A resumed run drops the
rows and the guard's events that it will write again, so the file holds them once.

Only rank 0 opens sinks. Not here: computing metrics (health.py), reducing them (metrics.py), and
rollouts (data/rollout_files.py).
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.monitoring.trackers import MlflowSink, TensorBoardSink, WandbSink

METRICS_FILE = "metrics.jsonl"
GUARD_EVENT = "guard"  # a resumed run writes it again

logger = logging.getLogger(__name__)


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float | None]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """All sinks of a run, as one context manager.

    Args:
        directory: the run directory.
        config: `run.name` and the `monitoring` section are read.
        first_step: the first step to write: 0 for a new run, the checkpoint's step + 1 for a
            resumed one. Existing rows from this step on are dropped.
    """

    def __init__(self, directory: str | Path, config: Config, first_step: int):
        directory = Path(directory)
        self._jsonl = JsonlSink(directory / METRICS_FILE, first_step)
        self._sinks: list[Sink] = [self._jsonl]
        if config.monitoring.tensorboard:
            self._sinks.append(TensorBoardSink(directory / "tensorboard", first_step))
        if config.monitoring.wandb:
            self._sinks.append(WandbSink(directory, config))
        if config.monitoring.mlflow is not None:
            self._sinks.append(MlflowSink(directory, config))

    def write(self, step: int, metrics: Metrics) -> None:
        """Write one row to every sink.

        Raises:
            ValueError: a metric is not listed in monitoring/names.py, or the step was written.
        """
        require_known(metrics)
        values = metrics.values_by_key()
        for sink in self._sinks:
            sink.write(step, values)

    def write_event(self, event: str, step: int, details: Mapping[str, Any]) -> None:
        """Write a line to metrics.jsonl that is no row of metrics, as the run stands at `step`."""
        self._jsonl.write_event(event, step, details)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonlSink:
    """Appends one line per step and flushes it, so that a killed run keeps its finished steps.

    Raises:
        UserError: the existing file has a malformed row; the message names file and line.
    """

    def __init__(self, path: str | Path, first_step: int = 0):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = _drop_from(self._path, first_step) if self._path.exists() else []
        self._last_step = kept[-1]["step"] if kept else -1
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        if step <= self._last_step:
            raise ValueError(f"{self._path}: step {step} after step {self._last_step}")
        non_finite = {key: str(value) for key, value in values.items() if not _is_finite(value)}
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


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in order, without events and without a half-written last line.

    Raises:
        UserError: the file is missing or empty, or a row is malformed or out of order; the message
            names file and line.
    """
    path = Path(path)
    rows = _parse(path, _lines(path))
    if not rows:
        raise UserError(f"{path}: no rows; the run has not finished its first step")
    return rows


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl, in order: each has "event", "after_step" and its details.

    Raises:
        UserError: the file is missing, or an event has no name or no step.
    """
    path = Path(path)
    events: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(path), start=1):
        row = _parse_line(path, number, line)
        if not isinstance(row, dict) or "event" not in row:
            continue
        name, step = row["event"], row.get("after_step")
        if not isinstance(name, str) or type(step) is not int or not 0 <= step < 2**63:
            raise UserError(
                f"{path}, line {number}: an event needs a name and the integer after_step; "
                f"it has {name!r:.60} and {step!r:.60}"
            )
        events.append(row)
    return events


def _lines(path: Path) -> list[bytes]:
    """The lines of `path`, without a last one that was cut by a kill or is being written."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the directory of a run that has started")
    data = path.read_bytes()
    lines = data.splitlines()
    if lines and not data.endswith(b"\n"):
        try:
            json.loads(lines[-1])
        except (ValueError, RecursionError):
            lines.pop()
    return lines


def _parse_line(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON ({error})") from error


def _drop_from(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Rewrite `path` without the rows of step >= first_step; return the rows that are kept.

    A last line without a newline was cut by a kill and is dropped too.
    """
    data = path.read_bytes()
    lines = data.split(b"\n")[:-1]
    rows = [row for row in _parse(path, lines) if row["step"] < first_step]
    kept = b"".join(line + b"\n" for line in lines if _is_before(json.loads(line), first_step))
    if kept != data:
        write_atomically(path, kept)
    return rows


def _is_before(row: dict[str, Any], first_step: int) -> bool:
    """Whether a run that resumes at `first_step` keeps the line. It writes steps and decisions of
    the guard again; other events are not repeated.
    """
    if "event" not in row:
        return row["step"] < first_step
    step = row.get("after_step")
    if row["event"] != GUARD_EVENT or not isinstance(step, int):
        return True
    return step < first_step


def _parse(path: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        row = _parse_line(path, number, line)
        if isinstance(row, dict) and "event" in row:
            continue
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or not 0 <= step < 2**63:
            raise UserError(f"{path}, line {number}: not a metrics row: it has no integer step")
        for key, value in row.items():
            is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
            if key != "non_finite" and value is not None and not is_number:
                raise UserError(
                    f"{path}, line {number}: {key} is {value!r:.60}, not a finite number"
                )
        if rows and row["step"] <= rows[-1]["step"]:
            raise UserError(
                f"{path}, line {number}: step {row['step']} after step {rows[-1]['step']}; steps "
                "must increase"
            )
        rows.append(row)
    return rows


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
