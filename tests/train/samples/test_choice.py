"""Which draws make a step, whatever finishes first, and which rank draws them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from stable_opd_mcore.data.prompts import PromptOrder
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Mean, Same
from stable_opd_mcore.records import Sample
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train import loop
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.samples import choice
from tests.shares import facts_of

PER_STEP, STEPS = 6, 9


class Ends(RolloutEngine):
    """Draws whose responses end at random, one after the other."""

    def __init__(self, noise: random.Random):
        self.noise = noise
        self.running: list[int] = []
        self.ended: set[int] = set()

    def begin(self, draws: Sequence[int]) -> None:
        """Of some the responses end at once."""
        self.running += draws
        for _ in range(self.noise.randrange(len(draws) + 1)):
            self.await_more()

    def await_more(self) -> bool:
        if not self.running:
            return False
        self.ended.add(self.running.pop(self.noise.randrange(len(self.running))))
        return self.noise.random() < 0.9  # else no server is left


def run_with(run: Any, ahead: int, engine: Any = None, **rollout: Any) -> Any:
    settings = {"order": "completed", "prompts_per_step": PER_STEP, "steps_ahead": ahead, **rollout}
    config = SimpleNamespace(
        rollout=SimpleNamespace(**settings), train=SimpleNamespace(steps=STEPS)
    )
    return replace(run, config=config, engine=engine, order=PromptOrder(7, 0, PER_STEP))


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_each_draw_is_trained_on_once_and_at_most_one_step_late(run, ahead):
    """Also where the number of ranks changes in between."""
    exchanged = 0
    for seed in range(10):
        engine, state, trained = Ends(random.Random(seed)), TrainState(), list[int]()
        completed = run_with(run, ahead, engine)
        submitted = 0
        for step in range(STEPS):
            end = min(step + 1 + ahead, STEPS) * PER_STEP
            engine.begin(range(submitted, end))
            submitted = end
            world = SimpleNamespace(data_rank=0, data_size=1 + engine.noise.randrange(3))
            completed = replace(completed, world=world)
            before = dict(choice.draws_ahead(completed, state))
            pool = [draw for draws in before.values() for draw in draws.numbers]
            assert {n for n in pool if n < state.cursor} == set(state.late)
            for own_step, draws in before.items():
                assert {draw // PER_STEP for draw in draws.numbers} == {own_step}
                assert draws.ranks == [n % PER_STEP % world.data_size for n in draws.numbers]
            with patch.object(choice, "gather_objects", lambda own: [own, engine.ended]):  # noqa: B023
                draws = choice.choose_draws(completed, state)
            assert draws.steps == [draw // PER_STEP for draw in draws.numbers]
            chosen = set(draws.numbers)
            assert len(chosen) == PER_STEP
            assert set(state.late) <= chosen <= set(pool)
            others = chosen - engine.ended - set(state.late)  # only where too few have ended
            assert not others or (engine.ended & set(pool)) <= chosen
            assert sorted(chosen) == draws.numbers
            trained += draws.numbers
            state = state.advance(draws.numbers, 1)
            assert len(state.late) == len(state.early)
            exchanged += len(state.early)
        assert sorted(trained) == [*range(STEPS * PER_STEP)]
        assert (state.late, state.early, state.cursor) == ((), (), STEPS * PER_STEP)
    assert exchanged > 50


def test_only_prompts_of_this_rank_count_as_its_finished_ones(run):
    """A finished prompt is told from an equal one of another step."""
    engine = SimpleNamespace(finished=lambda step: {"a"} if step == 4 else {"b", "c"})
    own = {(4, "a"): 24, (5, "a"): 30, (5, "b"): 31}
    with patch.object(choice, "gather_objects", lambda own: [own, {25}]):
        assert choice._ended(replace(run, engine=engine), own) == {24, 25, 31}


def test_in_the_submitted_order_a_step_has_its_own_draws_and_later_ones_are_drawn_ahead(run):
    ordered = run_with(run, 2, order="submitted")
    state = TrainState(step=6, cursor=36)
    assert choice.choose_draws(ordered, state).numbers == [*range(36, 42)]
    ahead = dict(choice.draws_ahead(ordered, state))
    assert {step: draws.numbers for step, draws in ahead.items()} == {
        7: [*range(42, 48)],
        8: [*range(48, 54)],
    }
    without_rollouts = run_with(run, 2)
    without_rollouts = replace(without_rollouts, objective=SimpleNamespace(needs_rollouts=False))
    assert choice.choose_draws(without_rollouts, state).numbers == [*range(36, 42)]


def test_lengths_of_early_prompts_are_reported(run):
    samples = [Sample("rollout", "s", (1,), (2,) * n, (True,) * n) for n in (1, 2, 3, 4, 5)]
    samples += [Sample("golden", "s", (1,), (2,) * 9, (True,) * 9)] * 3
    facts = replace(facts_of(samples), prompt_B=np.array([4, 4, 12, 12, 14, 4, 12, 14]))
    completed = run_with(run, 1)
    metrics = choice.early_metrics(completed, TrainState(step=1, cursor=6), facts)
    lengths = [len(sample.response_token_ids) for sample in samples[2:5]]
    assert metrics == {
        "rollout/early_groups": Same(2),
        "rollout/response_length_mean_early": Mean(sum(lengths), 3),
    }
    assert not choice.early_metrics(run_with(run, 1, order="submitted"), TrainState(), facts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "submitted"}, "2 prompts wait .* resume with rollout.order=completed"),
        ({"prompts_per_step": 1}, "prompts_per_step=1: .* resume with at least 2"),
    ],
)
def test_a_resume_that_would_lose_prompts_is_refused(run, monkeypatch, tmp_path, settings, message):
    left = TrainState(step=3, cursor=18, late=(15, 16), early=(18, 20))
    monkeypatch.setattr(loop, "newest_checkpoint", lambda _: tmp_path)
    monkeypatch.setattr(loop, "load_checkpoint", lambda *_: left)
    monkeypatch.setattr(loop.phases, "save_parts", lambda _: ())
    changed = run_with(run, 1, **settings)
    changed.config.run = SimpleNamespace(path=tmp_path)
    with pytest.raises(UserError, match=message):
        loop._resume(replace(changed, memory=SimpleNamespace(hold=lambda *_: None)))
    choice.refuse_exchanged(run_with(run, 1).config, left)
    choice.refuse_exchanged(changed.config, TrainState(step=3, cursor=18))
