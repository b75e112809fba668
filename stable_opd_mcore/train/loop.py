"""The loop around the step: cold start, resume, evaluation, files, checkpoints, final report.

Order within a step, because a process may be killed anywhere: update, evaluate, write the rollouts,
write the metrics row, save the checkpoint. A resumed run drops the rows after its checkpoint and
writes them again, identical.

Not here: what a step computes (step.py), how a run's parts are built (setup.py), the run
directory's lock and configs (run_lock.py, run_directory.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stable_opd_mcore.atomic_files import naming_disk_errors, write_atomically
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.rollout_files import RolloutWriter
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.models.huggingface import export_hf
from stable_opd_mcore.monitoring.report import write_report
from stable_opd_mcore.monitoring.sinks import METRICS_FILE, Sinks, read_metrics
from stable_opd_mcore.parallel.world import World, stop_world
from stable_opd_mcore.rollout.engine import EngineLost
from stable_opd_mcore.scoring.served_teacher import TeacherLost
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.checkpoint import CheckpointSaver, load_checkpoint, newest_checkpoint
from stable_opd_mcore.train.evaluation import evaluate_student
from stable_opd_mcore.train.in_flight import restore_in_flight, save_in_flight
from stable_opd_mcore.train.run_directory import (
    CHECKPOINTS,
    keep_resolved,
    on_first_rank,
    settings_changes,
)
from stable_opd_mcore.train.run_lock import RunLock
from stable_opd_mcore.train.setup import build_run, start_configured_world
from stable_opd_mcore.train.signals import (
    DONE,
    REQUEUE,
    Stopped,
    StopReason,
    StopSignals,
    clear_outcome,
    write_outcome,
)
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.step import Run, train_step
from stable_opd_mcore.train.watchdog import STACKS, Watchdog

MODEL = "model"  # the trained student in Hugging Face form, inside the run directory


@dataclass(frozen=True)
class Session:
    """This process's part in the run, the same for the cold start and the training after it."""

    world: World
    stop: StopSignals
    watchdog: Watchdog
    show_progress: bool
    accept_changes: bool

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes the files of which there is one."""
        return self.world.rank == 0


def train(config: Config, show_progress: bool = True, accept_changes: bool = False) -> Path:
    """Train to the last step, from the newest checkpoint if there is one.

    Args:
        accept_changes: resume with other settings than the checkpoints were trained with.

    Returns:
        The run directory.

    Raises:
        Stopped: a signal stopped the run between two steps; a checkpoint is saved.
        UserError: another run holds the directory.
        ConfigError: settings differ from the checkpoints' and are not accepted.
    """
    world = start_configured_world(config)
    home = config.run.path
    stop = StopSignals(world.device)
    with ExitStack() as stack:
        stack.enter_context(stop)
        on_first_rank(world, lambda: _take_directory(home, stack))
        watchdog = Watchdog(config.fault.watchdog_minutes, home / STACKS, world.rank)
        stack.enter_context(watchdog)
        session = Session(world, stop, watchdog, show_progress, accept_changes)
        try:
            if config.cold_start is not None:
                config = _after_cold_start(config, session)
            _train_phase(config, session)
        except Stopped as stopped:
            if stopped.reason == StopReason.REQUEUE:
                write_outcome(home, REQUEUE, stopped.step)
            elif world.rank == 0:
                print(
                    f"stopped by Ctrl-C after step {stopped.step}; checkpoint: "
                    f"{stopped.checkpoint}. The same command resumes there.",
                    file=sys.stderr,
                )
            stop_world()
            raise
        write_outcome(home, DONE, config.train.steps)
        stop_world()
    return home


def _take_directory(home: Path, stack: ExitStack) -> None:
    with naming_disk_errors(home):
        stack.enter_context(RunLock(home))
        clear_outcome(home)


def cold_start_config(config: Config) -> Config:
    """The config of the supervised run before distillation, in `<run>/cold_start`."""
    assert config.cold_start is not None
    cold = config.cold_start
    values = config.model_dump(by_alias=True)
    values["run"] = {"name": "cold_start", "directory": str(config.run.path)}
    values["objective"] = {"name": "sft"}
    values["rollout"] = {"prompts_per_step": cold.prompts_per_step}  # it samples none
    for section in ("aggregation", "kl", "mixture", "reference"):  # no use without rollouts
        del values[section]
    values["sampling"] = {"max_new_tokens": config.sampling.max_new_tokens}
    values["optimizer"] |= {"lr": cold.lr, "warmup_steps": cold.warmup_steps}
    values["train"] |= {"steps": cold.steps, "minibatches": 1}
    values["memory"] = {}  # it has neither servers nor frozen models
    values |= {"teacher": None, "cold_start": None}
    return Config.model_validate(values)


def _after_cold_start(config: Config, session: Session) -> Config:
    """Run the cold start unless its model exists; the config that starts from that model."""
    cold = cold_start_config(config)
    model = cold.run.path / MODEL
    if model.is_dir():
        on_first_rank(
            session.world, lambda: settings_changes(cold, accepted=session.accept_changes)
        )
    else:
        _train_phase(cold, session)
    values = config.model_dump(by_alias=True)
    values["tokenizer"]["path"] = config.tokenizer.path or config.student.path
    values["student"] |= {"path": str(model), "architecture": None, "random_init": False}
    values["cold_start"] = None
    return Config.model_validate(values)


def _train_phase(config: Config, session: Session) -> None:
    """Train one run directory to its last step, then export the model and write the report."""
    directory = config.run.path
    changed = on_first_rank(
        session.world, lambda: settings_changes(config, accepted=session.accept_changes)
    )
    run = build_run(
        config,
        session.world,
        lambda: bool(session.stop.requested()),
        session.watchdog.progress,
    )
    state = _resume(run)

    with ExitStack() as stack:
        stack.callback(run.engine.close)
        stack.enter_context(run.grader)
        sinks = stack.enter_context(_sinks(config, state)) if session.is_first_rank else None
        if sinks is not None:
            if changed:
                sinks.write_event("settings_changed", state.step, {"changes": changed})
            keep_resolved(config)
        shown = session.show_progress and session.is_first_rank
        advance = stack.enter_context(_progress(config, state, shown))
        if state.step == 0 and config.evaluation.every and run.held_out is not None:
            metrics = evaluate_student(run, state)
            if sinks is not None:
                sinks.write(0, metrics)
        session.stop.finish_step_first = True
        _train_steps(run, state, session, sinks, advance)
        session.stop.finish_step_first = False
        run.memory.hold(*phases.EXPORT)  # while there are servers that may have the device

    export_hf(run.student.chunks, directory / MODEL, save_tokenizer=run.tokenizer.save)
    if session.is_first_rank:
        _summarise(directory)
        write_report([directory], directory / "report.html")


def _train_steps(
    run: Run,
    state: TrainState,
    session: Session,
    sinks: Sinks | None,
    advance: Callable[[Metrics], None],
) -> None:
    """Train from `state` to the last step.

    Raises:
        Stopped: a signal came; a checkpoint of the last finished step is saved.
    """
    config = run.config
    writer = RolloutWriter(config.run.path, config.rollout.save)
    saver = CheckpointSaver(config.run.path / CHECKPOINTS, run.student, config.checkpoint.keep)
    while state.step < config.train.steps:
        try:
            result = train_step(run, state)
        except (EngineLost, TeacherLost) as lost:
            _save_without_servers(run, state, saver, session.stop, lost)
            raise
        state, metrics = result.state, result.metrics
        failed = None
        if run.held_out is not None and _due(state.step, config.evaluation.every, config):
            try:
                metrics = metrics | evaluate_student(run, state)
            except EngineLost as error:
                failed = error
        if sinks is not None:
            writer.write(state.step, result.rollouts)
            sinks.write(state.step, metrics)
        if failed is not None:  # the step itself is finished; a resumed run continues after it
            _save_without_servers(run, state, saver, session.stop, failed)
            raise failed
        reason, checkpoint = session.stop.requested_on_any_rank(), None
        if reason or _due(state.step, config.checkpoint.every or config.train.steps, config):
            checkpoint = _save(run, state, saver)
        else:
            saver.poll()
        ends = state.step == config.train.steps
        if reason or ends or not config.checkpoint.asynchronous:
            saver.finish()
        advance(metrics)
        session.watchdog.step_done()
        if reason and not ends:
            raise Stopped(state.step, reason, checkpoint)


def _sinks(config: Config, state: TrainState) -> Sinks:
    first_row = state.step + 1 if state.step else 0  # row 0 is the evaluation before training
    return Sinks(config.run.path, config, first_row)


def _save_without_servers(
    run: Run, state: TrainState, saver: CheckpointSaver, stop: StopSignals, lost: Exception
) -> None:
    """Save the last finished step; nothing has changed since.

    Raises:
        Stopped: this run is asked to stop, and so were its servers.
    """
    if state.step:  # the optimizer has no state to save before its first step
        checkpoint = _save(run, state, saver)
        saver.finish()
        if reason := stop.requested_on_any_rank():
            raise Stopped(state.step, reason, checkpoint) from lost


def _resume(run: Run) -> TrainState:
    """The newest checkpoint's state, its weights and rollouts restored; else the initial state."""
    directory = run.config.run.path
    newest = newest_checkpoint(directory / CHECKPOINTS)
    if newest is None:
        return TrainState()
    run.memory.hold(*phases.SAVE)
    state = load_checkpoint(newest, run.student)
    restore_in_flight(directory, state.step, run.engine)
    run.engine.publish(state.weight_version)
    return state


def _save(run: Run, state: TrainState, saver: CheckpointSaver) -> Path:
    """Begin to save a checkpoint of `state`; returns its directory."""
    saver.finish()  # before the rollouts of deleted checkpoints are looked for
    save_in_flight(run.config.run.path, state.step, run.engine, run.world)
    run.memory.hold(*phases.SAVE)
    return saver.begin(state)


def _due(step: int, every: int, config: Config) -> bool:
    """Whether something happens after `step`: every `every` steps and after the last; 0: never."""
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
    """A progress bar on stderr with a few metrics; yields the function that advances it."""
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
