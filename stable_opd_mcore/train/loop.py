"""The loop around the step: cold start, resume, evaluation, files, checkpoints, final report.

Order within a step, because a process may be killed anywhere: update, evaluate, write the rollouts,
write the metrics row, roll back if the guard says so, save the checkpoint. A resumed run drops the
rows after its checkpoint and writes them again.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.cold_start import after_cold_start, cold_start_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.run_directory import DONE, REQUEUE, RunDirectory
from stable_opd_mcore.inputs.changed_settings import settings_changes
from stable_opd_mcore.inputs.hashes import refuse_changed_base
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.models.files.huggingface import export_hf
from stable_opd_mcore.models.files.peft_directory import export_adapter, mark_positions
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.monitoring.metric_sinks import CHANGED_EVENT, MetricSinks, read_metrics
from stable_opd_mcore.parallel.rendezvous import naming_lost_ranks
from stable_opd_mcore.parallel.world import World, on_first_rank, stop_world
from stable_opd_mcore.rollout.engine import EngineLost
from stable_opd_mcore.serving.teacher import TeacherLost
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.held_out import evaluate_student
from stable_opd_mcore.train.loss_weights import loss_weights_of
from stable_opd_mcore.train.oversight.draft_watch import DraftWatch
from stable_opd_mcore.train.oversight.measures import (
    is_collapsed,
    refuse_collapsed,
    roll_back,
    warn_of_equal_models,
    with_normal_values,
    write_actions,
)
from stable_opd_mcore.train.oversight.signals import Stopped, StopSignals, write_outcome
from stable_opd_mcore.train.oversight.terminal import Terminal
from stable_opd_mcore.train.oversight.watchdog import Watchdog
from stable_opd_mcore.train.persistence.checkpoint import (
    CheckpointSaver,
    load_checkpoint,
    newest_checkpoint,
    restore_replaced,
)
from stable_opd_mcore.train.persistence.resolved_configs import (
    keep_resolved,
    take_directory,
)
from stable_opd_mcore.train.persistence.rollout_writer import write_step
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.persistence.stored_models import mark_trained
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.same_teacher import compare_with_files
from stable_opd_mcore.train.samples.token_values import write_token_values
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.step import train_step

Report = Callable[[RunDirectory], None]  # writes the report of a directory


@dataclass(frozen=True)
class Session:
    """This process's part in the run, the same for the cold start and the training after it."""

    world: World
    stop: StopSignals
    watchdog: Watchdog
    report: Report
    show_progress: bool
    accept_changes: bool

    def write_reports(self, files: RunDirectory) -> None:
        """Write summary.json and the report of a directory."""
        _write_summary(files)
        self.report(files)


def train_run(inputs: RunInputs, world: World, report: Report, show_progress: bool = True) -> Path:
    """Train to the last step, from the newest checkpoint if there is one; return the run directory.
    Ends the world.

    Args:
        report: called on rank 0 with a directory whose training has ended.

    Raises:
        Stopped: a signal stopped the run between two steps; a checkpoint is saved.
        UserError: settings, data, weights or layout that do not fit together.
    """
    config, home = inputs.config, inputs.config.run.path
    stop = StopSignals(world.device)
    with ExitStack() as stack:
        stack.enter_context(naming_lost_ranks())
        stack.enter_context(stop)
        on_first_rank(world, lambda: take_directory(stack, home, home))
        watchdog = stack.enter_context(
            Watchdog(config.fault.watchdog_minutes, config.run.files.stacks, world.rank)
        )
        session = Session(world, stop, watchdog, report, show_progress, inputs.accept_changes)
        try:
            if config.cold_start is not None:
                inputs = RunInputs(_after_cold_start(config, session))
            _train_directory(inputs, session)
        except Stopped as stopped:
            if world.rank == 0:
                print(stopped.text(), file=sys.stderr, flush=True)
            if stopped.reason.requeues:
                write_outcome(home, REQUEUE, stopped.step)
            stop_world()
            raise
        write_outcome(home, DONE, config.train.steps)
        stop_world()
    return home


def _after_cold_start(config: Config, session: Session) -> Config:
    """Run the cold start unless its model exists; the config that starts from that model."""
    cold = cold_start_config(config)
    model = cold.run.files.model
    if model.is_dir():
        _accepted_changes(cold, session)
    else:
        _train_directory(RunInputs(cold), session)
    return after_cold_start(config)


def _accepted_changes(config: Config, session: Session) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those of the checkpoints, on all ranks; an error if not
    accepted."""
    return on_first_rank(
        session.world, lambda: settings_changes(config, accepted=session.accept_changes)
    )


def _train_directory(inputs: RunInputs, session: Session) -> None:
    """Train one run directory to its last step, then export the model and write the report."""
    config, files = inputs.config, inputs.config.run.files
    changed = _accepted_changes(config, session)
    is_first_rank = session.world.rank == 0
    terminal = Terminal(config, session.show_progress and is_first_rank)
    terminal.say(f"run {config.run.name}, ranks: {session.world.world_size}")
    run = build_run(
        inputs,
        session.world,
        lambda: bool(session.stop.requested()),
        session.watchdog.progress,
        terminal.say,
    )
    state = _resume(run)

    with ExitStack() as stack:
        if run.served_teacher is not None:
            stack.callback(run.served_teacher.close)
        stack.callback(run.engine.close)
        stack.enter_context(run.grader)
        compare_with_files(run, terminal.say, session.watchdog.progress)
        first_row = state.step + 1 if state.step else 0  # row 0: the evaluation before training
        sinks = MetricSinks(files.path, config, first_row) if is_first_rank else None
        if sinks is not None:
            stack.enter_context(sinks)
            if changed:
                sinks.write_event(CHANGED_EVENT, state.step, {"changes": changed})
            keep_resolved(config)
        state = with_normal_values(run.world, files, state)
        terminal.say(
            f"{'resuming' if state.step else 'starting'} at step {state.step} of "
            f"{config.train.steps}; results in {files.path}; stable-opd report --follow "
            f"{files.path} shows them"
        )
        stack.enter_context(terminal.begin(state.step))
        run = replace(run, phase=terminal.phase)
        if state.step == 0 and config.evaluation.every and run.held_out is not None:
            metrics = evaluate_student(run, state)
            if sinks is not None:
                sinks.write(0, metrics)
        saver = CheckpointSaver(
            files.checkpoints,
            run.student,
            config.checkpoint.keep,
            run.moving,
            run.tokenizer.save,
        )
        session.stop.finish_step_first = True
        _train_steps(run, state, saver, session, sinks, terminal)
        session.stop.finish_step_first = False
        run.memory.hold(*phases.EXPORT)  # while there are servers that may have the device
    _export(run, max(state.step, config.train.steps))
    if is_first_rank:
        session.write_reports(files)
    terminal.say(f"finished: {files.model} is the model, {files.report} the report")


def _export(run: Run, steps: int) -> None:
    """Write the student after `steps` steps, and its low-rank factors by themselves if it has any.
    Collective."""
    config, chunks = run.config, run.student.chunks

    def describe(directory: Path, **more: Any) -> None:
        run.tokenizer.save(directory)
        mark_trained(directory, config.run.name, steps, **more)

    base, files = config.student.path, config.run.files
    on_first_rank(run.world, lambda: refuse_changed_base(config))
    export_hf(chunks, files.model, base=base, save_tokenizer=describe)
    if config.student.lora is not None:
        positions = mark_positions(architecture_of(chunks))
        export_adapter(chunks, files.adapter, base, partial(describe, **positions))


def _train_steps(
    run: Run,
    state: TrainState,
    saver: CheckpointSaver,
    session: Session,
    sinks: MetricSinks | None,
    terminal: Terminal,
) -> None:
    """Train from `state` to the last step.

    Raises:
        Stopped: a signal came; a checkpoint of the last finished step is saved.
        CollapsedError: the guard stopped the run, now or before it was resumed.
    """
    config = run.config
    draft = DraftWatch(config, architecture_of(run.student.chunks))
    refuse_collapsed(run, state, session.write_reports)
    state = roll_back(run, state)
    while state.step < config.train.steps:
        try:
            result = train_step(run, state)
        except (EngineLost, TeacherLost) as lost:
            _save_without_servers(run, state, saver, session.stop, lost)
            raise
        state, metrics = result.state, result.metrics
        failed = None
        if run.held_out is not None and _due(state.step, config.evaluation.every, config):
            run.phase("evaluation")
            try:
                metrics = metrics | evaluate_student(run, state)
            except EngineLost as error:
                failed = error
        write_step(config, run.world, state.step, result.rollouts)
        if sinks is not None:
            write_token_values(
                config.run.files.tokens(state.step), result.token_values, run.tokenizer
            )
            sinks.write(state.step, metrics)
            now = loss_weights_of(config, state.adapted, state.guard)
            write_actions(sinks, state.step, result.actions, now)
            values = metrics.values_by_key()
            warn_of_equal_models(state.step, values)
            draft.look(state.step, values, sinks)
        if failed is not None:  # the step itself is finished; a resumed run continues after it
            _save_without_servers(run, state, saver, session.stop, failed)
            raise failed
        state = roll_back(run, state)
        reason = session.stop.requested_on_any_rank()
        due = _due(state.step, config.checkpoint.every or config.train.steps, config)
        save_now = due or reason or is_collapsed(run, state)
        checkpoint = _save(run, state, saver) if save_now else None
        terminal.step_done(state.step, metrics.values_by_key(), result.rollouts)
        session.watchdog.step_done()
        refuse_collapsed(run, state, session.write_reports)
        if reason and state.step < config.train.steps:
            raise Stopped(state.step, reason, checkpoint)


def _save_without_servers(
    run: Run, state: TrainState, saver: CheckpointSaver, stop: StopSignals, lost: Exception
) -> None:
    """Save the last finished step; raise Stopped if run and servers were asked to stop together."""
    if state.step:  # the optimizer has no state to save before its first step
        checkpoint = _save(run, state, saver)
        if reason := stop.requested_on_any_rank():
            raise Stopped(state.step, reason, checkpoint) from lost


def _resume(run: Run) -> TrainState:
    """The newest checkpoint's state, its weights restored; else the initial state."""
    checkpoints = run.config.run.files.checkpoints
    on_first_rank(run.world, lambda: restore_replaced(checkpoints))
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        return TrainState()
    run.memory.hold(*phases.save_parts(run.config))
    state = load_checkpoint(newest, run.student, run.moving)
    run.engine.publish(state.weight_version)
    return state


def _save(run: Run, state: TrainState, saver: CheckpointSaver) -> Path:
    run.phase("save")
    run.memory.hold(*phases.save_parts(run.config))
    return saver.save(state)


def _due(step: int, every: int, config: Config) -> bool:
    """Whether something happens after `step`: every `every` steps and after the last; 0: never."""
    return bool(every) and (step % every == 0 or step == config.train.steps)


def _write_summary(files: RunDirectory) -> None:
    """Write summary.json: the last value of every metric."""
    last: dict[str, float] = {}
    for row in read_metrics(files.metrics):
        last |= {key: value for key, value in row.items() if value is not None}
    text = json.dumps(last, indent=1, sort_keys=True)
    write_atomically(files.summary, text.encode())
