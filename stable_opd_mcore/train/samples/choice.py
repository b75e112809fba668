"""Which prompts make a step (rollout.order), and which data-parallel rank draws each.

A draw is a place in the data order, counted over the run. Each step has its own draws, those from
its cursor on: a draw's step, which decides its noise, and its rank follow from its place.

`submitted`: a step trains on its own draws. `completed`: those of K - 1 steps are drawn ahead, K
being rollout.max_staleness, and a step trains on as many draws as ever: on those that the step
before has left of its own, on the others whose responses have all ended, the lowest first, and if
they are too few on unfinished ones. So no draw is left by two steps, and weights of its first token
are at most K updates old. A prompt may come twice in a step where an epoch ends, as two draws.

Not here: drawing and grading (drawing.py), the engines (rollout/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Mean, Metrics, Same
from stable_opd_mcore.parallel.world import gather_objects
from stable_opd_mcore.records import Prompt, SampleFacts
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run


@dataclass(frozen=True)
class Draws:
    """Draws of all ranks, rising, P of them."""

    numbers: Sequence[int]  # [P] their places in the data order
    rows: Sequence[int]  # [P] of the data
    steps: Sequence[int]  # [P] steps finished before the one whose own each is
    ranks: Sequence[int]  # [P] the data rank that draws each
    places: Sequence[int]  # 0 .. P - 1, those of this rank

    def prompts(self, run: Run) -> list[Prompt]:
        """Those of this rank."""
        return run.prompts.select([self.rows[place] for place in self.places])


def draws_of(run: Run, state: TrainState, numbers: Sequence[int]) -> Draws:
    """What is known of the draws before the step that follows `state`."""
    ranks = ranks_of(run, state, numbers)
    return Draws(
        numbers,
        [row for number in numbers for row in run.order.indices(number, 1)],
        [_step_of(run, state, number) for number in numbers],
        ranks,
        [place for place, rank in enumerate(ranks) if rank == run.world.data_rank],
    )


def ranks_of(run: Run, state: TrainState, numbers: Sequence[int]) -> list[int]:
    """The data rank that draws each: the ranks take the own draws of a step in turn."""
    size, ranks = run.config.rollout.prompts_per_step, run.world.data_size
    return [(number - state.cursor) % size % ranks for number in numbers]


def draws_ahead(run: Run, state: TrainState) -> list[tuple[int, Draws]]:
    """What is to be drawn in this step for later use, by its own step, the nearest first."""
    numbers = _pool(run.config, state)
    if not _exchanges(run):
        numbers = numbers[run.config.rollout.prompts_per_step :]  # the others are drawn at once
    own = groupby(numbers, key=lambda number: _step_of(run, state, number))
    return [(step, draws_of(run, state, list(of_step))) for step, of_step in own]


def choose_draws(
    run: Run,
    state: TrainState,
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Draws:
    """The draws on which the step after `state` trains. Collective.

    Args:
        waiting: entered while the engine waits for responses.
    """
    pool, size = _pool(run.config, state), run.config.rollout.prompts_per_step
    if not _exchanges(run):
        return draws_of(run, state, pool[:size])
    late, more = set(state.late), True
    own = draws_of(run, state, pool)
    own_prompts = {
        (own.steps[place], prompt.prompt_id): pool[place]
        for place, prompt in zip(own.places, own.prompts(run), strict=True)
    }
    while True:
        ended = _ended(run, own_prompts)
        if not more or len(late | ended) >= size:
            break
        with waiting():
            more = run.engine.await_more()
    first = sorted(pool, key=lambda number: (number not in late, number not in ended, number))
    return draws_of(run, state, sorted(first[:size]))


def early_metrics(run: Run, state: TrainState, facts: SampleFacts) -> Metrics:
    """With `completed`: how many prompts the step took from later ones, and their mean length.

    Args:
        facts: of all samples, with the numbers of draws.
    """
    if not _exchanges(run):
        return Metrics()
    end = state.cursor + run.config.rollout.prompts_per_step
    early = facts.select(~facts.golden_B & (facts.prompt_B >= end))
    length = Mean(float(early.response_tokens_B.sum()), len(early))
    return Metrics(
        {
            "rollout/early_groups": Same(len(np.unique(early.prompt_B))),
            "rollout/response_length_mean_early": length,
        }
    )


def refuse_exchanged(config: Config, state: TrainState) -> None:
    """Refuse settings under which a resumed run would lose or repeat prompts.

    Raises:
        UserError: prompts are exchanged between steps, and the order or the size of a step has
            changed so that they cannot come back.
    """
    if not state.late:
        return
    found, size = f"after step {state.step} {len(state.late)} prompts", len(state.late)
    if config.rollout.order != "completed":
        raise UserError(
            f"rollout.order={config.rollout.order}: {found} wait for the next step, and as many of "
            "later steps were trained on already; resume with rollout.order=completed"
        )
    if config.rollout.prompts_per_step < size:
        raise UserError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step}: {found} wait for the "
            f"next step (rollout.order=completed); resume with at least {size}"
        )


def _exchanges(run: Run) -> bool:
    return run.config.rollout.order == "completed" and run.objective.needs_rollouts


def _step_of(run: Run, state: TrainState, number: int) -> int:
    """Steps finished before the one whose own draw it is."""
    return state.step + (number - state.cursor) // run.config.rollout.prompts_per_step


def _pool(config: Config, state: TrainState) -> list[int]:
    """The draws that are drawn now or were before, and that no step has trained on; rising."""
    steps = min(1 + config.rollout.steps_ahead, config.train.steps - state.step)
    early, end = set(state.early), state.cursor + steps * config.rollout.prompts_per_step
    return [*state.late, *(draw for draw in range(state.cursor, end) if draw not in early)]


def _ended(run: Run, own_prompts: dict[tuple[int, str], int]) -> set[int]:
    """The draws whose responses have all ended, of all ranks. Collective.

    Args:
        own_prompts: the draw of each of this rank's steps and prompt ids.
    """
    finished = {step: run.engine.finished(step) for step, _ in own_prompts}
    own = {draw for (step, name), draw in own_prompts.items() if name in finished[step]}
    return set[int]().union(*gather_objects(own))
