"""Carry out the guard's decisions (guard.py): events, the return to a checkpoint, the stop."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stable_opd_mcore.config.guard_settings import MOST_STEPS_BETWEEN_SAVES
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import GUARD_EVENT, MetricSinks, read_run
from stable_opd_mcore.parallel.world import World, on_first_rank
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.loss_weights import LossWeights
from stable_opd_mcore.train.oversight.guard import Action
from stable_opd_mcore.train.oversight.onset import starts_anew
from stable_opd_mcore.train.persistence.checkpoint import find_fault, load_checkpoint
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run

_FIRST_STEPS = 3
_NO_DIFFERENCE = 1e-3  # nats a token; other weights, or another prompt, differ by more
logger = logging.getLogger(__name__)


class CollapsedError(UserError):
    """The guard has stopped the run."""


def warn_of_equal_models(step: int, metrics: Mapping[str, float | None]) -> None:
    """Log a warning if teacher and student give equal probabilities in the first steps."""
    kl = metrics.get("kl/teacher")
    if kl is not None and step <= _FIRST_STEPS and abs(kl) < _NO_DIFFERENCE:
        logger.warning(
            "step %d: KL(student || teacher) is %.1g, so the student learns nothing from the "
            "teacher; set teacher.path to other weights than the student's, or teacher.prompt",
            step,
            kl,
        )


def write_actions(
    sinks: MetricSinks, step: int, actions: Sequence[Action], now: LossWeights
) -> None:
    """An event in metrics.jsonl and a line of the log for each action after `step`.

    Args:
        now: the next step's weights: the guard's, or the config's where they are larger.
    """
    for action in actions:
        details = dict(action.details)
        if "beta" in details:
            details |= {"beta": now.beta, "lambda": now.lambda_}
        sinks.write_event(GUARD_EVENT, step, {"action": action.name, **details})
        found = ", ".join(
            f"{metric} {seen['recent']:.3g} (normal {seen['normal']:.3g})"
            for metric, seen in details.get("evidence", {}).items()
        )
        names = {"beta": "beta now", "lambda": "lambda now", "to_step": "to step"}
        held = [f"{name} {details[key]:.3g}" for key, name in names.items() if key in details]
        after = f"next: {details['next']}" if "next" in details else ""
        text = "; ".join(part for part in (found, ", ".join(held), after) if part)
        logger.warning("step %d: guard %s: %s", step, action.name.replace("_", " "), text)


def with_normal_values(world: World, files: RunDirectory, state: TrainState) -> TrainState:
    """The state of a run that starts or resumes; without the guard's normal values where changed
    settings make them those of another task. Collective."""

    def anew() -> bool:
        events = read_run(files.metrics)[1]
        return any(starts_anew(event) for event in events if event["after_step"] == state.step)

    if state.step == 0 or not on_first_rank(world, anew):
        return state
    return replace(state, guard=replace(state.guard, watched={}))


def is_collapsed(run: Run, state: TrainState) -> bool:
    return run.config.guard.acts and state.guard.measure == "stopped"


def roll_back(run: Run, state: TrainState) -> TrainState:
    """If the guard decided so, take weights, optimizer and generators of its healthy checkpoint.

    Step and cursor continue, so the next prompts and their sampling noise are fresh ones.
    Collective.

    Raises:
        UserError: that checkpoint is damaged or gone.
    """
    if not (run.config.guard.acts and state.guard.must_roll_back):
        return state
    step = state.guard.save_for(state.guard.rollbacks)
    assert step is not None
    path = run.config.run.files.checkpoint(step)
    if fault := find_fault(path):
        raise UserError(
            f"step {state.step}: the guard would return to {path}, which cannot be used: {fault}. "
            "Restore it from a copy, or set guard.policy=warn with --accept-changes"
        )
    run.memory.hold(*phases.save_parts(run.config))
    load_checkpoint(path, run.student, run.moving)
    run.engine.drop_ahead()
    state = replace(
        state,
        weight_version=state.weight_version + 1,
        guard=replace(state.guard, must_roll_back=False),
    )
    run.engine.publish(state.weight_version)
    return state


def refuse_collapsed(
    run: Run, state: TrainState, write_report: Callable[[RunDirectory], None]
) -> None:
    """Raise CollapsedError if the guard has stopped the run, after rank 0 has written the report of
    the run directory. Collective.
    """
    if not is_collapsed(run, state):
        return
    files = run.config.run.files
    on_first_rank(run.world, lambda: write_report(files))
    healthy = state.guard.healthy_save
    if healthy is None:
        remedy = (
            "There is no healthy checkpoint: start a new run with "
            f"checkpoint.every={MOST_STEPS_BETWEEN_SAVES} or less"
        )
    else:
        place = files.checkpoint(healthy)
        start = f"Newest healthy checkpoint: {place}. Start a new run with student.path set to"
        if run.config.student.lora is None:
            remedy = f"{start} it"
        else:
            remedy = f"{start} the model that `stable-opd convert` makes of it"
    remedy += " and other settings, or continue unguarded with guard.policy=warn --accept-changes"
    if run.overlap is not None and not run.objective.stop_ids:
        own, others = run.overlap.student.stop_ids, run.overlap.teacher.stop_ids
        if {*own} != {*others}:
            remedy += (
                ". The student stops on other tokens than the teacher, which by itself may be the "
                "cause: set objective.stop_class=true"
            )
    raise CollapsedError(
        f"{files.path}: the guard stopped the run after step {state.step}: the rollouts stayed "
        f"collapsed through {state.guard.rollbacks} returns to a healthy checkpoint. Evidence: the "
        f"guard's events in metrics.jsonl, and report.html. {remedy}"
    )
