"""Who trains on which sample: every rank knows facts of all samples, but tokens of its own only.

A data-parallel rank samples responses for its share of the prompts. Their lengths, rewards and
counts go to every rank (`gather_facts`). From these facts each rank computes the same minibatches,
normalisers and shares. Then each sample goes from the rank that has it to the ranks that train on
it (`share_out`), so the host work of a rank depends on its own share, and becomes part of a
micro-batch on its device (`pack_micro_batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.packing import most_of, pack
from stable_opd_mcore.data.partition import partition, split_by_prompt
from stable_opd_mcore.models.layers.fp8 import MULTIPLE
from stable_opd_mcore.parallel.context import slice_microbatch
from stable_opd_mcore.parallel.transfers import to_device
from stable_opd_mcore.parallel.world import World, exchange_objects, gather_objects
from stable_opd_mcore.records import MicroBatch, Sample
from stable_opd_mcore.sample_facts import SampleFacts, SampleWeights

_NOBODY = -1  # the batch rank of a sample that is not computed


@dataclass(frozen=True)
class Minibatch:
    samples: Sequence[Sample]  # trained on by this rank; indexed by MicroBatch.sample_index_N
    weights: SampleWeights  # one per sample
    places: NDArray[np.int64]  # where each sample is in the facts of the step
    source_B: NDArray[np.int64] | None = None  # see SampleFacts


def gather_facts(world: World, samples: Sequence[Sample]) -> SampleFacts:
    """The facts of the samples of all ranks: first the rollouts, then the golden solutions, each in
    the order of their prompts. Collective over the data-parallel ranks.
    """
    parts = gather_objects(_facts_of(world, samples), world.data_group)
    facts = SampleFacts.join([part for part in parts if len(part)])
    facts = facts.select(np.lexsort((facts.index_B, facts.slot_B, facts.golden_B)))
    # The samples of one rollout follow each other.
    rollout_3B = np.stack([facts.golden_B, facts.slot_B, facts.episode_B])
    begins_B = np.diff(rollout_3B, prepend=-1).any(axis=0)
    return replace(facts, episode_B=np.cumsum(begins_B))


def _facts_of(world: World, samples: Sequence[Sample]) -> SampleFacts:
    rewards = [np.nan if sample.reward is None else sample.reward for sample in samples]
    own = [s.teacher_prompt_token_ids for s in samples]
    teacher_tokens = [
        0 if ids is None else len(ids) + len(s.token_ids) - s.num_prompt_tokens
        for s, ids in zip(samples, own, strict=True)
    ]
    return SampleFacts(
        holder_B=np.full(len(samples), world.data_rank),
        index_B=np.arange(len(samples)),
        slot_B=np.array([sample.slot for sample in samples], np.int64),
        episode_B=np.array([sample.episode for sample in samples], np.int64),
        golden_B=np.array([sample.kind == "golden" for sample in samples], np.bool_),
        off_policy_B=np.array([sample.off_policy for sample in samples], np.bool_),
        tokens_B=np.array([len(s.token_ids) for s in samples], np.int64),
        sampled_tokens_B=np.array([len(s.places) for s in samples], np.int64),
        trained_tokens_B=np.array([np.count_nonzero(s.trained) for s in samples], np.int64),
        reward_B=np.array(rewards, np.float64),
        turns_B=np.array([max(1, s.ends_turn.sum()) for s in samples], np.int64),
        truncated_turns_B=np.array([s.num_truncated_turns for s in samples], np.int64),
        teacher_tokens_B=np.array(teacher_tokens, np.int64),
    )


def share_out(
    world: World,
    samples: Sequence[Sample],
    facts: SampleFacts,
    num_minibatches: int,
    weights_of: Callable[[SampleFacts], SampleWeights],
    costs_of: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    *,
    prompts_together: bool = False,
) -> list[Minibatch]:
    """This rank's part of every minibatch. Collective over the data-parallel ranks.

    All ranks get about the same cost of scored sequences, and of all sequences. Where the teacher
    has prompts of its own, its sequences count too. A sample without a sampled token counts in the
    weights of the others, but no rank computes it.

    Args:
        samples: this rank's.
        facts: those of all samples.
        weights_of: the token weights of a whole minibatch, from its facts.
        prompts_together: samples of a prompt go to one rank, where that leaves ranks balanced.
    """
    trainer_B = np.full(len(facts), _NOBODY)  # which batch rank trains on each sample
    own: list[NDArray[np.int64]] = []  # places of each minibatch
    weights: list[SampleWeights] = []
    for places in split_by_prompt(facts, num_minibatches):
        sample_weights = weights_of(facts.select(places))
        with_rows = np.flatnonzero(facts.sampled_tokens_B[places])
        places, sample_weights = places[with_rows], sample_weights.select(with_rows)
        part = facts.select(places)
        costs_B = costs_of(part.tokens_B)
        if part.teacher_tokens_B is not None:
            costs_B = costs_B + costs_of(part.teacher_tokens_B) * part.scored_B
        prompt_B = part.slot_B if prompts_together else None
        shares = partition(costs_B, world.batch_size, part.scored_B, prompt_B)
        for batch_rank, share in enumerate(shares):
            trainer_B[places[share]] = batch_rank
        mine = np.array(shares[world.batch_rank], np.int64)
        own.append(places[mine])
        weights.append(sample_weights.select(mine))
    held = collect(world, samples, facts, trainer_B)
    return [
        Minibatch(
            samples=[held[place] for place in places.tolist()],
            weights=weights_B,
            places=places,
            source_B=facts.select(places).source_B,
        )
        for places, weights_B in zip(own, weights, strict=True)
    ]


def collect(
    world: World, samples: Sequence[Sample], facts: SampleFacts, trainer_B: NDArray[np.int64]
) -> dict[int, Sample]:
    """The samples that this rank trains on, by their places in `facts`. Collective.

    A batch rank is `context_size` data-parallel ranks that follow each other; each of them receives
    the sample.
    """
    own = np.flatnonzero(facts.holder_B == world.data_rank)
    outgoing: list[list[Sample]] = []
    for data_rank in range(world.data_size):
        leaving = own[trainer_B[own] == data_rank // world.context_size]
        outgoing.append([samples[index] for index in facts.index_B[leaving].tolist()])
    incoming = exchange_objects(outgoing, world.data_group)
    mine = np.flatnonzero(trainer_B == world.batch_rank)
    held: dict[int, Sample] = {}
    for data_rank, received in enumerate(incoming):
        places = mine[facts.holder_B[mine] == data_rank].tolist()
        held.update(zip(places, received, strict=True))
    return held


def pack_micro_batches(
    config: Config,
    world: World,
    samples: Sequence[Sample],
    weights: SampleWeights,
    *,
    attention_length: float,
    routing: tuple[int, int] | None = None,
) -> list[MicroBatch]:
    """This rank's micro-batches, sliced under context parallelism. Collective over all ranks."""
    batches = pack(
        samples,
        weights,
        max_tokens=config.train.micro_batch_tokens,
        agree=lambda counts: most_of(gather_objects(counts, world.data_group)),
        attention_length=attention_length,
        pad_to_multiple=world.token_multiple * (MULTIPLE if config.fp8.is_on else 1),
        sequence_multiple=world.sequence_multiple,
        microbatch_multiple=world.microbatch_multiple,
        routing=routing,
        share_prefixes=config.train.share_prefixes,
    )
    slices = (slice_microbatch(b, world.context_rank, world.context_size) for b in batches)
    return [to_device(batch, world.device) for batch in slices]
