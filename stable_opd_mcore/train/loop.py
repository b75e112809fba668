"""The loop around the step: cold start, resume, evaluation, files, checkpoints, and the report at
the end.

Order within a step, for a process may die anywhere: update, evaluate, write the rollouts, write the
metrics row, save the checkpoint. A resumed run drops the rows after its checkpoint and writes them
again, identical. Not here: what a step computes (step.py) and how a run's parts are built
(setup.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.rollout_files import RolloutWriter
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.models.huggingface import export_hf
from stable_opd_mcore.monitoring.report import write_report
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, Sinks, read_metrics
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.rollout.engine import EngineLost
from stable_opd_mcore.scoring.served_teacher import TeacherLost
from stable_opd_mcore.train.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from stable_opd_mcore.train.evaluation import evaluate_student
from stable_opd_mcore.train.in_flight import restore_in_flight, save_in_flight
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.signals import (
    DONE,
    REQUEUE,
    Stopped,
    StopSignals,
    clear_outcome,
    shielded,
    write_outcome,
)
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.step import Run, train_step
from stable_opd_mcore.train.watchdog import STACKS, Watchdog

CHECKPOINTS = "checkpoints"
MODEL = "model"  # the trained student in Hugging Face form, inside the run directory


@dataclass(frozen=True)
class Guard:
    """What may end a run before its last step."""

    stop: StopSignals
    watchdog: Watchdog


def train(config: Config, show_progress: bool = True) -> Path:
    """Train to the last step, from the newest checkpoint where there is one; return the run
    directory.

    Raises:
        Stopped: the scheduler asked; a checkpoint is saved and a marker says so.
    """
    world = start_world(config.parallel, config.train.seed)
    home = config.run.path
    if world.rank == 0:
        clear_outcome(home)
    stop = StopSignals(world.device)
    watchdog = Watchdog(config.fault.watchdog_minutes, home / STACKS, world.rank)
    with stop, watchdog:
        guard = Guard(stop, watchdog)
        try:
            if config.cold_start is not None:
                config = _after_cold_start(config, world, guard, show_progress)
            _train_phase(config, world, guard, show_progress)
        except Stopped as stopped:
            write_outcome(home, REQUEUE, stopped.step)
            stop_world()
            raise
        write_outcome(home, DONE, config.train.steps)
        stop_world()
    return home


def cold_start_config(config: Config) -> Config:
    """The supervised run before distillation, in `<run>/cold_start`."""
    assert config.cold_start is not None
    cold = config.cold_start
    values = config.model_dump(by_alias=True)
    values["run"] = {"name": "cold_start", "directory": str(config.run.path)}
    values["objective"] = {"name": "sft"}
    values["rollout"] = {"prompts_per_step": cold.prompts_per_step}  # it draws none
    values["kl"]["beta"] = 0.0
    values["mixture"]["lambda"] = 0.0
    values["optimizer"] |= {"lr": cold.lr, "warmup_steps": cold.warmup_steps}
    values["train"] |= {"steps": cold.steps, "minibatches": 1}
    values |= {"teacher": None, "cold_start": None}
    return Config.model_validate(values)


def _after_cold_start(config: Config, world: World, guard: Guard, show_progress: bool) -> Config:
    """Run the cold start unless its model is there; the config that starts from it."""
    cold = cold_start_config(config)
    model = cold.run.path / MODEL
    if not model.is_dir():
        _train_phase(cold, world, guard, show_progress)
    values = config.model_dump(by_alias=True)
    values["tokenizer"]["path"] = config.tokenizer.path or config.student.path
    values["student"] |= {"path": str(model), "architecture": None, "random_init": False}
    values["cold_start"] = None
    return Config.model_validate(values)


def _train_phase(config: Config, world: World, guard: Guard, show_progress: bool) -> None:
    directory = config.run.path
    run = build_run(config, world, guard.stop.requested)
    state = _resume(run)
    speaks = world.rank == 0
    if speaks:
        save_config(config, directory / "config.resolved.yaml")

    with ExitStack() as stack:
        stack.callback(run.engine.close)
        stack.enter_context(run.grader)
        first_row = state.step + 1 if state.step else 0  # row 0 is the evaluation before training
        sinks = stack.enter_context(Sinks(directory, config, first_row)) if speaks else None
        writer = RolloutWriter(directory, config.rollout.save)
        advance = stack.enter_context(_progress(config, state, show_progress and speaks))
        if state.step == 0 and config.evaluation.every and run.held_out is not None:
            _write_evaluation(run, state, sinks)
        while state.step < config.train.steps:
            try:
                result = train_step(run, state)
            except (EngineLost, TeacherLost) as lost:
                _save_without_servers(run, state, guard, lost)
                raise
            state, metrics = result.state, result.metrics
            if run.held_out is not None and _due(state.step, config.evaluation.every, config):
                metrics = metrics | evaluate_student(run, state)
            if sinks is not None:
                writer.write(state.step, result.rollouts)
                sinks.write(state.step, metrics)
            stopping = guard.stop.requested_on_any_rank()
            if stopping or _due(state.step, config.checkpoint.every or config.train.steps, config):
                _save(run, state)
            advance(metrics)
            guard.watchdog.step_done()
            if stopping and state.step < config.train.steps:
                raise Stopped(state.step)

    export_hf(run.student.chunks, directory / MODEL, save_tokenizer=run.tokenizer.save)
    if speaks:
        _summarise(directory)
        write_report([directory], directory / "report.html")


def _write_evaluation(run: Run, state: TrainState, sinks: Sinks | None) -> None:
    """The evaluation before training, as row 0."""
    metrics = evaluate_student(run, state)
    if sinks is not None:
        sinks.write(0, metrics)


def _save_without_servers(run: Run, state: TrainState, guard: Guard, lost: Exception) -> None:
    """Save the last finished step; nothing has changed since.

    Raises:
        Stopped: this run is asked to stop, and so were its servers.
    """
    if state.step:  # the optimizer has no state to save before its first step
        _save(run, state)
        if guard.stop.requested_on_any_rank():
            raise Stopped(state.step) from lost


def _resume(run: Run) -> TrainState:
    """Where the newest checkpoint left off, its weights and rollouts in place; else the start."""
    directory = run.config.run.path
    newest = newest_checkpoint(directory / CHECKPOINTS)
    if newest is None:
        return TrainState()
    state = load_checkpoint(newest, run.student)
    restore_in_flight(directory, state.step, run.engine)
    run.engine.publish(state.weight_version)
    return state


def _save(run: Run, state: TrainState) -> None:
    directory = run.config.run.path
    save_in_flight(directory, state.step, run.engine, run.world)
    with shielded():
        save_checkpoint(directory / CHECKPOINTS, state, run.student, run.config.checkpoint.keep)


def _due(step: int, every: int, config: Config) -> bool:
    """Every `every` steps, and after the last one; 0 is never."""
    return bool(every) and (step % every == 0 or step == config.train.steps)


def _summarise(directory: Path) -> None:
    """summary.json: the last value of every metric."""
    last: dict[str, float] = {}
    for row in read_metrics(directory / METRICS_FILE):
        last |= {key: value for key, value in row.items() if value is not None}
    text = json.dumps(last, indent=1, sort_keys=True)
    write_atomically(directory / "summary.json", text.encode())


@contextmanager
def _progress(
    config: Config, state: TrainState, shown: bool
) -> Iterator[Callable[[Metrics], None]]:
    """A progress bar on stderr with the numbers one watches; yields the function that moves it."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(
            config.run.name, total=config.train.steps, completed=state.step, numbers=""
        )

        def advance(metrics: Metrics) -> None:
            watched = ("loss/total", "rollout/accuracy", "rollout/truncation_rate")
            values = metrics.values_by_key()
            shown_values = [(key, values.get(key)) for key in watched]
            text = "  ".join(f"{key} {v:.3g}" for key, v in shown_values if v is not None)
            bar.update(task, advance=1, numbers=text)

        yield advance
