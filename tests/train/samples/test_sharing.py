"""What ranks know of all samples, and which samples they receive."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.packing import costs
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import Sample
from stable_opd_mcore.train.samples.sharing import Minibatch, gather_facts, share_out
from tests.parallel.launch import run_ranks
from tests.shares import sample_of, weights_of

FIRST = 20  # slot of the step's first prompt


def samples_of(places: list[int], with_rollouts: bool = True) -> list[Sample]:
    """Two rollouts of each prompt, then the golden solutions."""
    noise = {place: np.random.default_rng(place) for place in places}

    def sample(kind, place, reward=None):
        length = int(noise[place].integers(1, 40))
        ids = noise[place].integers(0, 99, length)
        experts = np.full((length + 1, 1, 2), place, np.int16)
        made = sample_of(
            kind, f"s:{place}", (place,), ids, ids % 3 > 0, reward=reward, slot=FIRST + place
        )
        if kind == "golden":
            return made
        return replace(made, routed_experts=experts, episode=int(reward))

    rollouts = [sample("rollout", place, float(k)) for place in places for k in range(2)]
    return rollouts * with_rollouts + [sample("golden", place) for place in places]


def minibatches(world: World, with_rollouts: bool = True) -> list[Minibatch]:
    own = samples_of([*range(5)][world.data_rank :: world.data_size], with_rollouts)
    facts = gather_facts(world, own)
    return share_out(
        world,
        own,
        facts,
        2,
        lambda part: weights_of(part, pg=part.trained_tokens_B, sft=part.reward_B),
        lambda tokens_B: costs(tokens_B, 20.0),
    )


def test_facts_are_in_the_order_of_the_prompts(world):
    facts = gather_facts(world, samples_of([3, 0, 1, 4, 2]))
    slots = [*range(FIRST, FIRST + 5)]
    assert facts.slot_B.tolist() == [slot for slot in slots for _ in range(2)] + slots
    assert facts.golden_B.tolist() == [False] * 10 + [True] * 5
    assert facts.episode_B.tolist() == [*range(1, 16)]
    assert facts.reward_B[:4].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert np.isnan(facts.reward_B[10:]).all()
    first, second = minibatches(world)
    assert sorted(first.places.tolist()) == [0, 1, 4, 5, 8, 9, 10, 12, 14]  # every second prompt
    assert len(second.samples) == 6
    assert [len(each.samples) for each in minibatches(world, with_rollouts=False)] == [3, 2]


def test_an_episode_without_a_token_counts_in_the_weights_and_is_not_computed(world):
    own = samples_of([0, 1])
    own[1] = sample_of("rollout", "s:0", (0,), (), episode=1, slot=FIRST)
    facts = gather_facts(world, own)
    (whole,) = share_out(
        *(world, own, facts, 1),
        lambda part: weights_of(part, pg=np.arange(6) + part.turns_B.sum()),
        lambda tokens_B: costs(tokens_B, 20.0),
    )
    assert sorted(whole.places.tolist()) == [0, 2, 3, 4, 5]
    assert whole.samples == [own[facts.index_B[place]] for place in whole.places]
    assert whole.weights.pg_B.tolist() == (whole.places + 6).tolist()


def share_on_ranks(rank: int, world_size: int, directory: Path, context: int) -> None:
    world = start_world(ParallelConfig(context=context), seed=0)
    found = [minibatches(world), minibatches(world, with_rollouts=False)]
    torch.save([[vars(each) for each in both] for both in found], directory / f"{rank}.pt")
    stop_world()


@pytest.mark.parametrize(("ranks", "context"), [(3, 1), (4, 2)])
def test_every_sample_reaches_the_ranks_that_train_on_it(tmp_path, world, ranks, context):
    """Samples and weights are those of one rank; ranks of one context group hold the same."""
    run_ranks(ranks, share_on_ranks, tmp_path, context)
    expected = [minibatches(world), minibatches(world, with_rollouts=False)]
    shares = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    for kind in range(2):
        for number, whole in enumerate(expected[kind]):
            parts = [Minibatch(**share[kind][number]) for share in shares]
            for rank, part in enumerate(parts):
                same = parts[rank - rank % context]
                assert part.samples == same.samples
                for place, sample, pg in zip(
                    part.places, part.samples, part.weights.pg_B, strict=True
                ):
                    at = whole.places.tolist().index(place)
                    assert sample == whole.samples[at]
                    assert pg == whole.weights.pg_B[at]
            places = np.concatenate([part.places for part in parts[::context]])
            assert sorted(places.tolist()) == sorted(whole.places.tolist())


def share_with_own_prompts(rank: int, world_size: int, directory: Path) -> None:
    """Each rank has two of four equal samples; for the first one the teacher reads 900 tokens."""
    world = start_world(ParallelConfig(), seed=0)
    sample = sample_of("rollout", "s:0", (1,), (2,), (True,))
    of_ranks = [(900, 10), (10, 10)]
    own = [replace(sample, teacher_prompt_token_ids=np.zeros(n)) for n in of_ranks[rank]]
    own = [replace(one, slot=2 * number + rank) for number, one in enumerate(own)]
    facts = gather_facts(world, own)
    (part,) = share_out(world, own, facts, 1, weights_of, lambda tokens_B: costs(tokens_B, np.inf))
    torch.save(sorted(len(s.teacher_prompt_token_ids) for s in part.samples), directory / str(rank))
    stop_world()


def test_ranks_are_balanced_by_the_teachers_prompts_too(tmp_path):
    run_ranks(2, share_with_own_prompts, tmp_path)
    assert [torch.load(tmp_path / str(rank)) for rank in range(2)] == [[900], [10, 10, 10]]
