"""Hand-made samples, and their facts, weights and shares, as the ranks of a step have them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.packing import Kind, costs, fill, pack
from stable_opd_mcore.data.partition import partition
from stable_opd_mcore.records import MicroBatch, Sample, SampleKind
from stable_opd_mcore.sample_facts import SampleFacts, SampleWeights


def sample_of(
    kind: SampleKind,
    prompt_id: str,
    prompt_token_ids: Sequence[int] | NDArray[np.int32],
    response_token_ids: Sequence[int] | NDArray[np.int32],
    trained: Any = None,
    rollout_logprobs: Any = None,
    **fields: Any,
) -> Sample:
    """One response after its prompt, with the record's other fields; trained: None is all."""
    start, count = len(prompt_token_ids), len(response_token_ids)
    token_ids = np.append(prompt_token_ids, response_token_ids)
    trained = np.ones(count, np.bool_) if trained is None else trained
    places = np.arange(start, start + count, dtype=np.int32)
    given = (token_ids, places, start, trained, rollout_logprobs)
    return Sample(kind, prompt_id, *given, **fields)


def facts_of(samples: Sequence[Sample]) -> SampleFacts:
    """The facts of samples that one rank holds."""
    prompts = list(dict.fromkeys(sample.prompt_id for sample in samples))
    rewards = [np.nan if sample.reward is None else sample.reward for sample in samples]
    return SampleFacts(
        holder_B=np.zeros(len(samples), np.int64),
        index_B=np.arange(len(samples)),
        slot_B=np.array([prompts.index(sample.prompt_id) for sample in samples], np.int64),
        episode_B=np.arange(len(samples)),
        golden_B=np.array([sample.kind == "golden" for sample in samples], np.bool_),
        off_policy_B=np.array([sample.off_policy for sample in samples], np.bool_),
        tokens_B=np.array([len(s.token_ids) for s in samples], np.int64),
        sampled_tokens_B=np.array([len(s.places) for s in samples], np.int64),
        trained_tokens_B=np.array([s.trained.sum() for s in samples], np.int64),
        reward_B=np.array(rewards, np.float64),
        turns_B=np.array([max(1, s.ends_turn.sum()) for s in samples], np.int64),
        truncated_turns_B=np.array([s.num_truncated_turns for s in samples], np.int64),
    )


def with_gaps(sample: Sample) -> Sample:
    """The sample as if the second of every three sampled tokens were observed."""
    kept = np.arange(len(sample.places)) % 3 != 1
    scores, fields = sample.teacher_scores, {}
    arrays = ("places", "trained", "rollout_logprobs", "repetitive", "turns", "turn_truncated")
    for name in arrays:
        values = getattr(sample, name)
        fields[name] = values if values is None else values[kept]
    return replace(sample, **fields, teacher_scores=scores and scores.select(kept))


def weights_of(
    samples: Sequence[Sample], pg: Any = 0.0, kl: Any = 0.0, sft: Any = 0.0, advantage: Any = None
) -> SampleWeights:
    """From one number for all samples, or one for each."""
    shape = len(samples)
    return SampleWeights(
        *(np.broadcast_to(np.asarray(v, np.float64), shape) for v in (pg, kl, sft)),
        None if advantage is None else np.broadcast_to(np.asarray(advantage, np.float64), shape),
    )


def pack_share(
    samples: Sequence[Sample],
    weights: SampleWeights,
    data_rank: int,
    data_size: int,
    **options: Any,
) -> list[MicroBatch]:
    """One rank's micro-batches; their sample_index_N is the place in `samples`."""
    tokens = facts_of(samples).tokens_B
    length, multiple = options.get("attention_length", np.inf), options.get("sequence_multiple", 1)
    scored = facts_of(samples).scored_B
    shares = partition(costs(tokens, length, multiple), data_size, scored)
    lengths = -(-tokens // multiple) * multiple

    def needed(kind: bool) -> int:
        of_kind = [[place for place in share if scored[place] == kind] for share in shares]
        return max(len(fill(lengths, places, options["max_tokens"])) for places in of_kind)

    mine = np.array(shares[data_rank], np.int64)
    batches = pack(
        [samples[place] for place in shares[data_rank]],
        weights.select(mine),
        agree=lambda _counts: {Kind(): needed(True), Kind(True): needed(False)},
        **options,
    )
    return [
        replace(b, sample_index_N=b.sample_index_N.new_tensor(mine)[b.sample_index_N])
        for b in batches
    ]
