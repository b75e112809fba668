"""Episodes token by token: their turns, contexts, budgets and versions."""

import random

import numpy as np
import pytest

from stable_opd_mcore.data.bridge import Kept, Observed
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import Prompt, Sampling, Segment, Turn
from stable_opd_mcore.rollout.episodes import End, Episode

BEGUN = Episode.begin(Prompt("a", "", (1, 2)), 3, 1)
ASKED = Episode.begin(Prompt("a", "", (1, 2), environment=""), 3, 1)
END = End(Ending.STOP)
SAMPLING = Sampling(max_new_tokens=4)
WINDOW = 12


def drawn(episode: Episode, *ids: int, reason="stop", version=2) -> Episode:
    """With experts of the whole context, as an engine reports them; an expert is the token read."""
    experts = np.append(episode.context, ids)[:-1, None, None].astype(np.int16)
    logprobs, tokens = np.full(len(ids), -0.5, np.float32), np.array(ids, np.int32)
    text = f"{reason} {ids}"
    return episode.with_tokens(tokens, logprobs, reason, version, text=text, routed_experts=experts)


def test_without_an_observation_the_first_turn_is_the_episode():
    assert BEGUN.rollout().finish_reason == "open"
    longer = BEGUN
    for token, version in ((5, 2), (6, 2), (7, 3)):
        assert longer.is_open
        assert not longer.is_ended
        longer = drawn(longer, token, reason="length" if token == 7 else "open", version=version)
    assert not longer.is_open
    assert not longer.is_ended
    assert longer.awaits_observation
    ended = longer.after(End(Ending.LENGTH))
    assert ended.is_ended
    assert not ended.awaits_observation
    rollout = ended.rollout()
    assert rollout.token_ids.tolist() == [5, 6, 7]
    assert rollout.rollout_logprobs.tolist() == [-0.5] * 3
    assert rollout.segments == (Segment(2, 2), Segment(1, 3))
    assert (rollout.weight_version, rollout.finish_reason) == (2, "length")
    assert rollout.routed_experts is not None
    assert rollout.routed_experts.ravel().tolist() == [1, 2, 5, 6]
    assert (rollout.text, rollout.sample_index) == ("length (7,)", 3)
    assert rollout.has_one_turn
    assert BEGUN.token_ids.tolist() == []


def test_an_observation_continues_the_context_or_restarts_it():
    episode = drawn(drawn(BEGUN, 5, reason="open"), 9).after(Observed((6, 6), text="66"))
    assert episode.context.tolist() == [1, 2, 5, 9, 6, 6]
    episode = drawn(episode, 7, 9, version=3).after(Observed((8, 8), restarts=True))
    assert episode.context.tolist() == [8, 8]
    episode = drawn(drawn(episode, 4, reason="open", version=3), 4, reason="length", version=4)
    rollout = episode.after(End(Ending.STOP, 0.5)).rollout()
    assert (rollout.reward, rollout.grading_failure) == (0.5, None)
    assert rollout.turns == (
        Turn(2, "stop", text="stop (9,)"),
        Turn(2, "stop", (6, 6), text="stop (7, 9)", observed="66"),
        Turn(2, "length", (8, 8), restarts=True, text="length (4,)"),
    )
    assert rollout.token_ids.tolist() == [5, 9, 7, 9, 4, 4]
    assert rollout.segments == (Segment(2, 2), Segment(3, 3), Segment(1, 4))
    assert (rollout.finish_reason, rollout.text) == ("stop", "length (4,)")
    for sample in rollout_samples([rollout]):
        assert sample.routed_experts is not None
        assert sample.routed_experts.ravel().tolist() == sample.token_ids[:-1].tolist()


@pytest.mark.parametrize(
    ("first", "read"),
    [(Observed((6, 7, 8), restarts=True), [6, 7, 8]), (Observed(), [1, 2])],
)
def test_an_environment_observes_first(first, read):
    assert ASKED.awaits_observation
    assert not ASKED.is_open
    episode = ASKED.after(first)
    assert episode.is_open
    (sample,) = rollout_samples([drawn(episode, 5).after(END).rollout()])
    assert sample.token_ids.tolist() == [*read, 5]
    assert (sample.num_prompt_tokens, sample.places.tolist()) == (len(read), [len(read)])


@pytest.mark.parametrize("seed", range(20))
def test_each_turn_of_a_tree_of_contexts_has_one_place_in_the_samples(seed):
    """Turns continue any context at its end, fork it at an earlier turn, or begin another one. A
    turn's token ids are its number, so that samples show which they have."""
    rng = random.Random(seed)
    episode, read, ends = ASKED.after(Observed()), [], [[]]
    for number in range(12):
        version = 2 + number // 5
        read.append(tuple(episode.context.tolist()))
        episode = drawn(episode, *[number] * rng.randrange(1, 3), reason="open", version=version)
        episode = drawn(episode, number, 99, version=version)
        is_cut = rng.random() < 0.3
        kept = Kept(episode.turns[-1].num_tokens - 1, "cut") if is_cut else None
        ends[episode.number].append(episode.context[:-1] if is_cut else episode.context)
        if rng.random() < 0.2:
            what = Observed((50, number), restarts=True, kept=kept)
        else:
            of = rng.randrange(len(ends))
            place = rng.randrange(len(ends[of])) if rng.random() < 0.4 else len(ends[of]) - 1
            forked = (*ends[of][place].tolist(), 60, number)
            what = Observed((60, number), context=of, kept=kept)
            if place < len(ends[of]) - 1:
                what = Observed(forked, restarts=True, kept=kept)
        episode = episode.after(what)
        ends += [[] for _ in episode.contexts[len(ends) :]]
    read.append(tuple(episode.context.tolist()))
    episode = drawn(episode, 12, 12, 12, version=9).after(End(Ending.STOP, 1.0, kept=Kept(2, "")))
    rollout = episode.rollout()
    found, versions = (
        {},
        np.repeat(
            [part.weight_version for part in rollout.segments],
            [part.num_tokens for part in rollout.segments],
        ),
    )
    assert versions.tolist() == [9 if n == 12 else 2 + n // 5 for n in turn_numbers(rollout)]
    for sample in rollout_samples([rollout]):
        assert sample.routed_experts.ravel().tolist() == sample.token_ids[:-1].tolist()
        starts = np.flatnonzero(np.diff(sample.turns, prepend=-1))
        for place in sample.places[starts]:
            number = int(sample.token_ids[place])
            assert number not in found
            found[number] = tuple(sample.token_ids[:place].tolist())
    assert found == dict(enumerate(read))
    assert len(rollout.token_ids) == sum(turn.num_tokens for turn in rollout.turns)


def turn_numbers(rollout) -> list[int]:
    """For each sampled token the number that its turn's first token is."""
    lengths = [turn.num_tokens for turn in rollout.turns]
    starts = np.cumsum([0, *lengths[:-1]])
    return np.repeat(rollout.token_ids[starts], lengths).tolist()


def test_an_episode_that_its_environment_forgot_begins_anew():
    episode = drawn(ASKED.after(Observed((6,))), 5).after(None)
    assert episode.awaits_observation
    assert (episode.turns, episode.context.tolist(), len(episode.token_ids)) == ((), [1, 2], 0)


HORIZONS = [
    (None, (2, 10), 0, 4),  # Sampling's, which has the step's horizon already
    (20, None, 0, 20),
    (20, (2, 10), 0, 2),
    (20, (2, 10), 5, 11),
    (20, (2, 10), 30, 20),
    (20, (2, 10), None, 20),  # held out
    (3, (5, 10), 0, 3),  # a turn that is shorter than the first horizon
]  # own, horizon, finished, limit


def test_a_turn_with_its_own_most_tokens_follows_the_horizon():
    for own, horizon, finished, limit in HORIZONS:
        prompt = Prompt("a", "", (1, 2), environment="", max_new_tokens=own)
        sampling = Sampling(max_new_tokens=4, training_step=finished, horizon=horizon)
        assert Episode.begin(prompt, 0, 0).limit(sampling) == limit


def test_a_turn_gets_its_limit_or_what_the_window_has_left():
    assert BEGUN.budget(SAMPLING, WINDOW) == 4
    first = drawn(BEGUN, 5, 5, reason="open")
    assert first.budget(SAMPLING, WINDOW) == 2
    for observed, budget in ((1, 4), (3, 4), (4, 3), (6, 1)):
        second = drawn(first, 9).after(Observed((6,) * observed))
        assert second.budget(SAMPLING, WINDOW) == budget
        if budget > 1:
            longer = drawn(second, 5, reason="open")
            assert longer.budget(SAMPLING, WINDOW) == budget - 1
