"""The collapse guard's decision after a step: a pure function of its state and the step's metrics.

    state, actions = decide(config.guard, state, step, values, saved)

Metrics are global, so every rank decides the same; the state is part of the checkpoint, so a
resumed run decides the same again. Symptoms (train/oversight/onset.py) are a warning. Damage starts
measures (measures.py), one after the other, each after the earlier one had PATIENCE steps to help:
raise beta and lambda, roll back, stop. Beta and lambda stay raised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stable_opd_mcore.config.guard_settings import HEALTHY_AFTER, GuardConfig
from stable_opd_mcore.train.oversight.onset import (
    DETECTORS,
    Series,
    Symptom,
    is_damage,
    learn,
    observe,
    symptoms,
)

ActionName = Literal["warned", "recovered", "raised", "rolled_back", "stopped"]
Measure = Literal["none", "raised", "stopped"]
PATIENCE = 10  # steps that a measure gets to help; also steps without symptoms until measures end
MAX_ROLLBACKS = 2
FIRST_SHARE = 0.25  # share of max_beta and max_lambda at the first raise; each further step doubles


@dataclass(frozen=True)
class GuardState:
    watched: dict[str, Series] = field(default_factory=dict[str, Series])  # keys: detectors
    measure: Measure = "none"  # the one in force
    beta: float = 0.0  # least kl.beta of the next step
    lambda_: float = 0.0  # least mixture.lambda of the next step
    warned: bool = False  # there were symptoms less than PATIENCE steps ago
    since_measure: int = 0  # steps with damage since the newest measure
    quiet: int = 0  # steps in a row without symptoms
    rollbacks: int = 0
    must_roll_back: bool = False  # decided and not yet carried out
    healthy_save: int | None = None  # step of the checkpoint to return to
    recent_save: int | None = None  # becomes healthy_save if the run stays healthy

    @property
    def kept_saves(self) -> frozenset[int]:
        """Steps whose checkpoints the run may return to."""
        return frozenset({self.healthy_save, self.recent_save} - {None})  # pyright: ignore


@dataclass(frozen=True)
class Action:
    """One event of metrics.jsonl."""

    name: ActionName
    details: dict[str, Any]  # evidence, and the least beta and lambda from the next step on


def decide(
    config: GuardConfig,
    state: GuardState,
    step: int,
    values: Mapping[str, float | None],
    saved: bool,
) -> tuple[GuardState, list[Action]]:
    """The guard after `step`.

    Args:
        values: the step's metrics, the same on every rank.
        saved: a checkpoint of `step` is saved by checkpoint.every. One that a signal causes does
            not count: a run without the signal must decide the same.
    """
    if not config.acts:
        state = GuardState(state.watched, warned=state.warned, quiet=state.quiet)
    if config.policy == "off" or state.measure == "stopped":
        return state, []
    state = replace(state, watched=observe(state.watched, values))
    found = symptoms(state.watched)
    damaged = is_damage(found, state.watched)
    if found:
        state, actions = _with_symptoms(config, state, found, damaged)
    else:
        state, actions = _without_symptoms(config, state, step, saved)
    if not damaged:
        state = replace(state, watched=learn(state.watched, values))
    return state, actions


def _with_symptoms(
    config: GuardConfig, state: GuardState, found: list[Symptom], damaged: bool
) -> tuple[GuardState, list[Action]]:
    evidence = {
        "evidence": {
            DETECTORS[symptom.name].metric: {
                "recent": symptom.recent,
                "normal": symptom.normal,
                "bound": symptom.bound,
            }
            for symptom in found
        }
    }
    actions = [] if state.warned else [Action("warned", evidence)]
    state = replace(state, warned=True, quiet=0, recent_save=None)
    if not (config.acts and damaged):
        return state, actions
    state = replace(state, since_measure=state.since_measure + 1, **_raised(config, state))
    if state.measure == "none":
        action, state = "raised", replace(state, measure="raised", since_measure=0)
    elif state.since_measure < PATIENCE:
        return state, actions
    else:
        action, state = _next_measure(state)
    held: dict[str, Any] = {"beta": state.beta, "lambda": state.lambda_}
    if action == "rolled_back":
        held |= {"to_step": state.healthy_save}
    return state, [*actions, Action(action, evidence | held)]


def _next_measure(state: GuardState) -> tuple[ActionName, GuardState]:
    if state.healthy_save is None or state.rollbacks == MAX_ROLLBACKS:
        return "stopped", replace(state, measure="stopped")
    forgotten = {name: replace(series, recent=()) for name, series in state.watched.items()}
    return "rolled_back", replace(
        state,
        watched=forgotten,
        since_measure=0,
        rollbacks=state.rollbacks + 1,
        must_roll_back=True,
    )


def _without_symptoms(
    config: GuardConfig, state: GuardState, step: int, saved: bool
) -> tuple[GuardState, list[Action]]:
    state = replace(state, quiet=state.quiet + 1)
    actions: list[Action] = []
    if state.quiet >= PATIENCE and (state.warned or state.measure != "none"):
        actions.append(Action("recovered", {"beta": state.beta, "lambda": state.lambda_}))
        state = replace(state, warned=False, measure="none", since_measure=0)
    if state.recent_save is not None and step >= state.recent_save + HEALTHY_AFTER:
        state = replace(state, healthy_save=state.recent_save, recent_save=None)
    if config.acts and saved and state.recent_save is None and not state.warned:
        state = replace(state, recent_save=step)
    return state, actions


def _raised(config: GuardConfig, state: GuardState) -> dict[str, Any]:
    def of(value: float, largest: float) -> float:
        return min(largest, max(2 * value, FIRST_SHARE * largest))

    return {
        "beta": of(state.beta, config.max_beta),
        "lambda_": of(state.lambda_, config.max_lambda),
    }
