"""The collapse guard's decision after a step: a pure function of its state and the step's metrics.

    state, actions = decide(config.guard, state, step, values, saved)

Metrics are global, so every rank decides the same; the state is part of the checkpoint, so a
resumed run decides the same again. Symptoms (train/oversight/onset.py) are a warning. Damage starts
measures (measures.py), one after the other, each after the earlier one had PATIENCE steps to help:
raise beta and lambda, roll back, roll back further, stop. Beta and lambda stay raised.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

from stable_opd_mcore.config.guard_settings import HEALTHY_AFTER, MAX_ROLLBACKS, GuardConfig
from stable_opd_mcore.train.oversight.onset import DETECTORS, Seen, Series, watch

ActionName = Literal["warned", "damaged", "raised", "rolled_back", "stopped", "recovered"]
Measure = Literal["none", "raised", "stopped"]
PATIENCE = 10  # steps that a measure gets to help; also steps without symptoms until measures end
FIRST_SHARE = 0.25  # share of max_beta and max_lambda at the first raise; each further step doubles


@dataclass(frozen=True)
class GuardState:
    watched: dict[str, Series] = field(default_factory=dict[str, Series])  # keys: detectors
    measure: Measure = "none"  # the one in force
    beta: float = 0.0  # least kl.beta of the next step
    lambda_: float = 0.0  # least mixture.lambda of the next step
    warned: bool = False  # there were symptoms less than PATIENCE steps ago
    damaged: bool = False  # there was damage since the warning
    since_measure: int = 0  # steps with damage since the newest measure
    quiet: int = 0  # steps in a row without symptoms
    rollbacks: int = 0
    must_roll_back: bool = False  # decided and not yet carried out
    healthy_save: int | None = None  # step of the newest healthy checkpoint
    older_save: int | None = None  # of the healthy one before it
    recent_save: int | None = None  # becomes healthy_save if the run stays healthy

    @property
    def kept_saves(self) -> frozenset[int]:
        """Steps whose checkpoints the run may return to."""
        saves = {self.healthy_save, self.older_save, self.recent_save}
        return frozenset(step for step in saves if step is not None)

    def save_for(self, rollback: int) -> int | None:
        """Step of the checkpoint of a run's first or second return; None if there is none."""
        older = self.healthy_save if self.older_save is None else self.older_save
        return {1: self.healthy_save, MAX_ROLLBACKS: older}.get(rollback)


@dataclass(frozen=True)
class Action:
    """One event of metrics.jsonl."""

    name: ActionName
    details: dict[str, Any]  # evidence, least beta and lambda from the next step on, what is next


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
        kept = {"warned": state.warned, "damaged": state.damaged, "quiet": state.quiet}
        state = GuardState(state.watched, **kept)
    if config.policy == "off" or state.measure == "stopped":
        return state, []
    seen = watch(state.watched, values)
    state = replace(state, watched=seen.watched)
    if seen.symptoms:
        return _with_symptoms(config, state, seen, values)
    return _without_symptoms(config, state, step, saved)


def _with_symptoms(
    config: GuardConfig, state: GuardState, seen: Seen, values: Mapping[str, float | None]
) -> tuple[GuardState, list[Action]]:
    damaged = state.damaged or seen.damaged
    names: list[ActionName] = [] if state.warned else ["warned"]
    if damaged and not state.damaged:
        names.append("damaged")
    state = replace(state, warned=True, damaged=damaged, quiet=0, recent_save=None)
    if config.acts and seen.damaged:
        measure, state = _measure(config, state, values)
        names += measure
    evidence = {
        DETECTORS[name].metric: {"recent": recent, "normal": normal, "bound": bound}
        for name, recent, normal, bound in map(astuple, seen.symptoms)
    }
    details: dict[str, Any] = {"evidence": evidence, "next": _outlook(config, state)}
    held: dict[str, Any] = {"beta": state.beta, "lambda": state.lambda_}
    if state.must_roll_back:
        held |= {"to_step": state.save_for(state.rollbacks)}
    return state, [
        Action(name, details if name in ("warned", "damaged") else details | held) for name in names
    ]


def _measure(
    config: GuardConfig, state: GuardState, values: Mapping[str, float | None]
) -> tuple[list[ActionName], GuardState]:
    """The measure after a step with damage, if one is due, and the state with it. To raise what is
    at its bound is no measure."""
    beta = _raised(state.beta, config.max_beta)
    lambda_ = _raised(state.lambda_, config.max_lambda)
    in_force = values.get("kl/beta") or state.beta, values.get("mixture/lambda") or state.lambda_
    helps = beta > in_force[0] or lambda_ > in_force[1]
    since = state.since_measure + 1
    state = replace(state, beta=beta, lambda_=lambda_, since_measure=since)
    if state.measure == "none" and helps:
        return ["raised"], replace(state, measure="raised", since_measure=0)
    target = state.save_for(state.rollbacks + 1)
    if since < PATIENCE and (state.measure == "raised" or target is None):
        return [], state
    if target is None:
        return ["stopped"], replace(state, measure="stopped")
    forgotten = {name: replace(s, recent=(), worth=()) for name, s in state.watched.items()}
    return ["rolled_back"], replace(
        state,
        watched=forgotten,
        measure="raised",
        since_measure=0,
        rollbacks=state.rollbacks + 1,
        must_roll_back=True,
    )


def _raised(value: float, largest: float) -> float:
    return min(largest, max(2 * value, FIRST_SHARE * largest))


def _outlook(config: GuardConfig, state: GuardState) -> str:
    """What the guard does next."""
    if not config.acts:
        return f"nothing, as guard.policy={config.policy}"
    if state.measure == "stopped":
        return "the run ends"
    if not state.damaged:
        return "a measure if there is damage"
    target = state.save_for(state.rollbacks + 1)
    then = "the run is stopped" if target is None else f"the run returns to step {target}"
    return f"{then} after {PATIENCE - state.since_measure} more steps with damage"


def _without_symptoms(
    config: GuardConfig, state: GuardState, step: int, saved: bool
) -> tuple[GuardState, list[Action]]:
    state = replace(state, quiet=state.quiet + 1)
    actions: list[Action] = []
    if state.quiet >= PATIENCE and (state.warned or state.measure != "none"):
        state = replace(state, warned=False, damaged=False, measure="none", since_measure=0)
        held = {"beta": state.beta, "lambda": state.lambda_, "next": _outlook(config, state)}
        actions.append(Action("recovered", held))
    if state.recent_save is not None and step >= state.recent_save + HEALTHY_AFTER:
        healthy, older = state.recent_save, state.healthy_save
        state = replace(state, healthy_save=healthy, older_save=older, recent_save=None)
    if config.acts and saved and state.recent_save is None and not state.warned:
        state = replace(state, recent_save=step)
    return state, actions
