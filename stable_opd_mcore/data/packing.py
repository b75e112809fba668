"""Share out the samples of a minibatch over data-parallel ranks, and pack a rank's samples into
micro-batches.

Sequences lie end to end, and cu_seqlens holds their bounds. Tokens that fill a micro-batch up to a
multiple are a last sequence without loss rows. Context parallelism needs every sequence to be a
multiple; its filling tokens stand at its end, where causal attention hides them from the others.

A micro-batch has samples of one `Kind`: samples that other models score and samples that none does
(Sample.is_scored) are never in one, so the score phase runs over the first kind only; nor are those
of two objectives, nor those that the teacher scores and those that it does not.

Suffixes of names: records.py; P prompts, M micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stable_opd_mcore.records import MicroBatch, Sample, SequenceScores
from stable_opd_mcore.sample_facts import SampleFacts, SampleWeights


class Kind(NamedTuple):
    """What the samples of a micro-batch have in common, in the order of the micro-batches: see
    `MicroBatch`. No model scores other golden solutions, so their loss is the same everywhere."""

    is_not_scored: bool = False
    objective: int = 0
    is_not_taught: bool = False

    @classmethod
    def of(cls, sample: Sample) -> Kind:
        """The kind of a sample."""
        if not sample.is_scored:
            return cls(True)
        return cls(False, sample.objective, not sample.is_taught)


Counts = Mapping[Kind, int]

_PAD_TOKEN = 0  # any valid id: no loss reads it and no token attends to it


def split_by_prompt(facts: SampleFacts, parts: int) -> list[NDArray[np.int64]]:
    """Places of the samples of at most `parts` minibatches: prompt i goes to minibatch i modulo
    `parts`, with all its samples.
    """
    _, first_P, prompt_B = np.unique(facts.slot_B, return_index=True, return_inverse=True)
    order_P = np.argsort(np.argsort(first_P))  # a prompt's place in the order of appearance
    split = [np.flatnonzero(order_P[prompt_B] % parts == part) for part in range(parts)]
    return [part for part in split if len(part)]


def costs(
    tokens_B: NDArray[np.int64], attention_length: float, sequence_multiple: int = 1
) -> NDArray[np.float64]:
    """What each sequence costs, in tokens; attention doubles the cost of `attention_length`."""
    lengths_B = _up_to(sequence_multiple, tokens_B)
    return lengths_B * (1 + lengths_B / attention_length)


def partition(
    costs_B: NDArray[np.float64], parts: int, first_B: NDArray[np.bool_] | bool = True
) -> list[list[int]]:
    """Places of the sequences of each part, balanced by cost: those of `first_B`, and all together.

    Those of `first_B` come first, the costliest first; each goes to the part with the lowest sum.
    """
    loads = [(0.0, part) for part in range(parts)]  # a heap
    shares: list[list[int]] = [[] for _ in range(parts)]
    order_B = np.lexsort((-costs_B, ~np.broadcast_to(first_B, len(costs_B))))
    for index, cost in zip(order_B.tolist(), costs_B[order_B].tolist(), strict=True):
        load, part = loads[0]
        heapq.heapreplace(loads, (load + cost, part))
        shares[part].append(index)
    return shares


def pack(
    samples: Sequence[Sample],
    weights: SampleWeights,
    *,
    max_tokens: int,
    agree: Callable[[Counts], Counts] = lambda counts: counts,
    attention_length: float = math.inf,
    pad_to_multiple: int = 1,
    sequence_multiple: int = 1,
    microbatch_multiple: int = 1,
    routing: tuple[int, int] | None = None,
) -> list[MicroBatch]:
    """The micro-batches of this rank's samples, on the host.

    Args:
        samples: those that this rank trains on; those of weight zero too, for the metrics.
        max_tokens: limit of T; a longer sequence is a micro-batch of its own.
        agree: turns the numbers of micro-batches of each kind that this rank needs into the
            numbers that every rank makes.
        attention_length: the one of `costs`, which balances micro-batches.
        pad_to_multiple: T is a multiple of this (World.token_multiple).
        sequence_multiple: every sequence is a multiple of this (World.sequence_multiple).
        microbatch_multiple: the number of micro-batches of each kind is a multiple of this.
        routing: layers and experts of a token (Y, X), where rollouts bring their experts.

    Returns:
        Micro-batches whose sample_index_N indexes `samples`, the scored ones first; those without
        samples have N = 0.
    """
    for sample in samples:
        places = sample.places
        assert sample.num_prompt_tokens  # the token before a sampled one predicts it
        assert (np.diff(places, prepend=sample.num_prompt_tokens - 1) > 0).all()
        for values in (sample.trained, sample.rollout_logprobs, sample.repetitive):
            assert values is None or len(values) == len(places)
    tokens_B = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    costs_B = costs(tokens_B, attention_length, sequence_multiple)
    lengths_B = _up_to(sequence_multiple, tokens_B)
    kinds: dict[Kind, list[int]] = {}
    order: list[int] = np.argsort(-costs_B, kind="stable").tolist()
    for index in order:
        kinds.setdefault(Kind.of(samples[index]), []).append(index)
    bins = {kind: fill(lengths_B, members, max_tokens) for kind, members in kinds.items()}
    counts = agree({kind: len(of_kind) for kind, of_kind in bins.items()}) or {Kind(): 1}
    multiples = (sequence_multiple, math.lcm(sequence_multiple, pad_to_multiple))
    return [
        _build(samples, weights, members, multiples, routing, kind)
        for kind, needed in sorted(counts.items())
        for members in level(
            *(lengths_B, costs_B, bins.get(kind, [])),
            *(_up_to(microbatch_multiple, needed), max_tokens),
        )
    ]


def most_of(counts: Sequence[Counts]) -> Counts:
    """The largest number of each kind."""
    kinds = {kind for each in counts for kind in each}
    return {kind: max(each.get(kind, 0) for each in counts) for kind in kinds}


def fill(lengths_B: NDArray[np.int64], members: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each member into the first bin with room for it, at most max_tokens in a bin."""
    bins: list[list[int]] = []
    room_M = np.zeros(len(members), np.int64)
    for index in members:
        length = int(lengths_B[index])
        fitting = np.flatnonzero(room_M[: len(bins)] >= length)
        place = int(fitting[0]) if len(fitting) else len(bins)
        if place == len(bins):
            bins.append([])
            room_M[place] = max_tokens
        bins[place].append(index)
        room_M[place] -= length
    return bins


def level(
    lengths_B: NDArray[np.int64],
    costs_B: NDArray[np.float64],
    bins: Sequence[Sequence[int]],
    count: int,
    max_tokens: int,
) -> list[list[int]]:
    """The members of bins in `count` bins of about equal cost, still at most max_tokens in a bin.

    Pipeline stages wait for the costliest micro-batch. The costliest member comes first, each goes
    to the bin with the lowest sum that has room; where one finds none, the bins stay as they are.
    """
    levelled: list[list[int]] = [[] for _ in range(count)]
    loads_M, used_M = np.zeros(count), np.zeros(count, np.int64)
    for index in sorted((i for members in bins for i in members), key=lambda i: -costs_B[i]):
        length = int(lengths_B[index])
        open_M = (used_M == 0) | (used_M + length <= max_tokens)
        place = int(np.where(open_M, loads_M, np.inf).argmin())
        if not open_M[place]:
            return [list(members) for members in bins] + [[]] * (count - len(bins))
        levelled[place].append(index)
        loads_M[place] += costs_B[index]
        used_M[place] += length
    return levelled


def _build(
    samples: Sequence[Sample],
    weights: SampleWeights,
    members: Sequence[int],
    multiples: tuple[int, int],  # divide a sequence's length, and T
    routing: tuple[int, int] | None,
    kind: Kind,
) -> MicroBatch:
    chosen = [samples[index] for index in members]
    members_S = np.array(members, dtype=np.int64)
    tokens_S = np.array([len(sample.token_ids) for sample in chosen], dtype=np.int64)
    sampled_S = np.array([len(sample.places) for sample in chosen], dtype=np.int64)
    lengths_S = _up_to(multiples[0], tokens_S)
    used = int(lengths_S.sum())
    padding = max(multiples[1], _up_to(multiples[1], used)) - used
    sequences_S = np.append(lengths_S, padding) if padding else lengths_S
    starts_S = np.cumsum(lengths_S) - lengths_S
    tokens = [
        part
        for sample, tail in zip(chosen, (lengths_S - tokens_S).tolist(), strict=True)
        for part in (sample.token_ids, _padding(tail))
    ]
    tokens_T = _join([*tokens, _padding(padding)], np.int64)
    arrays = _row_values(chosen, weights.select(members_S), sampled_S)
    if not (kind.is_not_scored or kind.is_not_taught):
        arrays |= _served_scores([sample.teacher_scores for sample in chosen])
    if routing is not None:
        shape = (len(tokens_T), *routing)
        arrays["routed_experts_TYX"] = _routed_experts(chosen, starts_S, shape)
    places_N, token_index_N = _join([s.places for s in chosen], np.int64), _counters(sampled_S)
    arrays |= {
        "tokens_T": tokens_T,
        "positions_T": _counters(sequences_S),
        "cu_seqlens": np.append(0, np.cumsum(sequences_S)).astype(np.int32),
        # Position p predicts p + 1: the first sampled token's row is the token before it.
        "rows_N": np.repeat(starts_S - 1, sampled_S) + places_N,
        "sample_index_N": np.repeat(members_S, sampled_S),
        "token_index_N": token_index_N,
        "index_in_turn_N": _indices_in_turns(arrays["turn_N"], token_index_N),
        "golden_rows_G": np.flatnonzero(arrays["golden_N"]),
    }
    tensors: dict[str, Any] = {
        name: torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        for name, array in arrays.items()
    }
    return MicroBatch(
        max_seqlen=int(sequences_S.max()),
        is_scored=not kind.is_not_scored,
        objective=kind.objective,
        is_taught=not kind.is_not_taught,
        **tensors,
    )


def _row_values(
    chosen: Sequence[Sample], weights: SampleWeights, sampled_S: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """MicroBatch's fields that do not depend on where the sequences lie."""

    def each(values: Sequence[bool]) -> NDArray[np.bool_]:
        return np.repeat(np.array(values, dtype=np.bool_), sampled_S)

    def weight(values_S: NDArray[np.float64], on_N: Any = True) -> NDArray[np.float32]:
        return np.repeat(values_S.astype(np.float32), sampled_S) * on_N

    def or_zeros(parts: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> NDArray[Any]:
        pairs = zip(parts, sampled_S.tolist(), strict=True)
        arrays: list[NDArray[Any]] = [
            np.zeros(n, dtype) if part is None else part for part, n in pairs
        ]
        return _join(arrays, dtype)

    trained_N = _join([sample.trained for sample in chosen], np.bool_)
    values: dict[str, NDArray[Any]] = {
        "targets_N": _join([sample.token_ids[sample.places] for sample in chosen], np.int64),
        "golden_N": each([sample.kind == "golden" for sample in chosen]),
        "pg_weight_N": weight(weights.pg_B, trained_N),
        "kl_weight_N": weight(weights.kl_B),
        "sft_weight_N": weight(weights.sft_B, trained_N),
        "rollout_logprob_N": or_zeros([sample.rollout_logprobs for sample in chosen], np.float32),
        "repetitive_N": or_zeros([sample.repetitive for sample in chosen], np.bool_),
        "turn_N": or_zeros([sample.turns for sample in chosen], np.int64),
        "truncated_N": or_zeros([sample.turn_truncated for sample in chosen], np.bool_),
    }
    if weights.advantage_B is not None:
        values["given_advantage_N"] = weight(weights.advantage_B)
    return values


def _indices_in_turns(
    turn_N: NDArray[np.int64], token_index_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The place of each token in its turn; `token_index_N` is that in its sample."""
    rows_N = _range(len(turn_N))
    begins_N = (token_index_N == 0) | (np.diff(turn_N, prepend=-1) != 0)
    return rows_N - np.maximum.accumulate(np.where(begins_N, rows_N, 0))


def _served_scores(scores: Sequence[SequenceScores | None]) -> dict[str, NDArray[Any]]:
    """MicroBatch's fields from a served teacher, which has scored all samples or none."""
    found = [each for each in scores if each is not None]
    if not found:
        return {}
    assert len(found) == len(scores), "train/samples/served_scores.py waits for all scores"
    return {
        "served_logprob_N": np.concatenate([each.logprobs_L for each in found]),
        "served_top_ids_NK": np.concatenate([each.top_ids_LK for each in found]),
        "served_top_logprobs_NK": np.concatenate([each.top_logprobs_LK for each in found]),
        "served_extra_logprobs_NE": np.concatenate([each.extra_logprobs_LE for each in found]),
    }


def _routed_experts(
    chosen: Sequence[Sample], starts_S: NDArray[np.int64], shape: tuple[int, int, int]
) -> NDArray[np.int16]:
    """The engine's choices at the places of `chosen`, -1 elsewhere."""
    experts_TYX = np.full(shape, -1, dtype=np.int16)
    for start, sample in zip(starts_S.tolist(), chosen, strict=True):
        if sample.routed_experts is not None:
            experts_TYX[start : start + len(sample.routed_experts)] = sample.routed_experts
    return experts_TYX


def _up_to(multiple: int, lengths: Any) -> Any:
    """The next multiple of each length."""
    return -(-lengths // multiple) * multiple


def _padding(length: int) -> NDArray[np.int32]:
    return np.full(length, _PAD_TOKEN, np.int32)


def _join(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """All parts as one flat array."""
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def _counters(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. length - 1 for each length, concatenated."""
    return _join([_range(length) for length in lengths.tolist()], np.int64)


def _range(length: int) -> NDArray[np.int64]:
    return np.arange(length, dtype=np.int64)
