"""The sinks of metrics: metrics.jsonl always, TensorBoard and Weights & Biases if configured.

`metrics.jsonl` holds one JSON object per step: "step", then the metrics in sorted order. A mean
over nothing is null. A value that is not finite is null too, because JSON has no NaN;
`"non_finite": {"grad_norm": "nan"}` then names it, and a warning is logged. A resumed run drops the
rows that it will write again, so the file holds every step once.

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

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.monitoring.names import require_known

METRICS_FILE = "metrics.jsonl"

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


class TensorBoardSink:
    """Scalars under their keys, without the undefined ones. A resumed run purges later steps."""

    def __init__(self, directory: str | Path, first_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        for key, value in values.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; its own settings hold the account.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(self, directory: str | Path, config: Config):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "monitoring.wandb=true needs the wandb package: pip install wandb, or set "
                "monitoring.wandb=false"
            ) from error
        self._run = wandb.init(
            project="stable-opd",
            name=config.run.name,
            id=config.run.name,
            resume="allow",
            dir=str(directory),
            config=config.model_dump(mode="json", by_alias=True),
        )

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        self._run.log({key: value for key, value in values.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in order.

    Raises:
        UserError: the file is missing or empty, or a row is malformed or out of order; the message
            names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the directory of a run that has started")
    lines = path.read_bytes().splitlines()
    if not lines:
        raise UserError(f"{path}: no rows; the run has not finished its first step")
    return _parse(path, lines)


def _drop_from(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Rewrite `path` without the rows of step >= first_step; return the rows that are kept.

    A last line without a newline was cut by a kill and is dropped too.
    """
    data = path.read_bytes()
    lines = data.split(b"\n")[:-1]
    rows = [row for row in _parse(path, lines) if row["step"] < first_step]
    kept_steps = {row["step"] for row in rows} | {None}  # events have no step and stay
    kept = b"".join(line + b"\n" for line in lines if json.loads(line).get("step") in kept_steps)
    if kept != data:
        write_atomically(path, kept)
    return rows


def _parse(path: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from error
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
