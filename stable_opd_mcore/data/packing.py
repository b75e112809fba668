"""Pack a rank's samples of a minibatch into micro-batches.

Sequences lie end to end, and cu_seqlens holds their bounds. Tokens that fill a micro-batch up to a
multiple are a last sequence without loss rows. Context parallelism needs every sequence to be a
multiple; its filling tokens stand at its end, where causal attention hides them from the others.

A micro-batch has samples of one `Kind`: all are scored by other models or none is
(Sample.is_scored), all have one objective, and all are taught or none is. So the score phase leaves
out whole micro-batches, and each has the loss of one objective.

Suffixes of names: records.py; P prompts, M micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stable_opd_mcore.data.shared_prefixes import paths, put_together
from stable_opd_mcore.records import MicroBatch, Sample, SequenceScores
from stable_opd_mcore.sample_facts import SampleWeights


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


def costs(
    tokens_B: NDArray[np.int64],
    attention_length: float,
    sequence_multiple: int = 1,
    shared_B: NDArray[np.int64] | int = 0,
) -> NDArray[np.float64]:
    """What each sequence costs, in tokens; attention doubles the cost of `attention_length`. The
    first `shared_B` of its tokens are only attended to.
    """
    lengths_B = _up_to(sequence_multiple, tokens_B)
    return (lengths_B - shared_B) * (1 + (lengths_B + shared_B) / attention_length)


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
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """The micro-batches of this rank's samples, on the host.

    Args:
        samples: those that this rank trains on; those of weight zero too, for the metrics.
        max_tokens: limit of T; a longer sequence begins a micro-batch of its own.
        agree: turns the numbers of micro-batches of each kind that this rank needs into the
            numbers that every rank makes.
        attention_length: the one of `costs`, which balances micro-batches.
        pad_to_multiple: T is a multiple of this (World.token_multiple).
        sequence_multiple: every sequence is a multiple of this (World.sequence_multiple).
        microbatch_multiple: the number of micro-batches of each kind is a multiple of this.
        routing: layers and experts of a token (Y, X), where rollouts bring their experts.
        share_prefixes: compute what samples have in common at their beginning once
            (shared_prefixes.py); `sequence_multiple` is then 1.

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
    kinds = [Kind.of(sample) for sample in samples]
    groups, shared_B = [[index] for index in range(len(samples))], np.zeros_like(tokens_B)
    if share_prefixes:
        assert sequence_multiple == 1, "config refuses context parallelism with shared prefixes"
        groups, shared_B = put_together(samples, kinds, max_tokens)
    costs_B = costs(tokens_B, attention_length, sequence_multiple, shared_B)
    own_B = _up_to(sequence_multiple, tokens_B) - shared_B
    lengths_G = np.array([own_B[group].sum() for group in groups], np.int64)
    costs_G = np.array([costs_B[group].sum() for group in groups], np.float64)
    groups_of: dict[Kind, list[int]] = {}
    order: list[int] = np.argsort(-costs_G, kind="stable").tolist()
    for number in order:
        groups_of.setdefault(kinds[groups[number][0]], []).append(number)
    bins = {kind: fill(lengths_G, numbers, max_tokens) for kind, numbers in groups_of.items()}
    counts = agree({kind: len(of_kind) for kind, of_kind in bins.items()}) or {Kind(): 1}
    multiples = (sequence_multiple, math.lcm(sequence_multiple, pad_to_multiple))
    return [
        _build(
            *(samples, weights, [index for number in numbers for index in groups[number]]),
            *(shared_B, multiples, routing, kind),
        )
        for kind, needed in sorted(counts.items())
        for numbers in level(
            *(lengths_G, costs_G, bins.get(kind, [])),
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
    shared_B: NDArray[np.int64],  # tokens of the sample before it
    multiples: tuple[int, int],  # divide a sequence's length, and T
    routing: tuple[int, int] | None,
    kind: Kind,
) -> MicroBatch:
    chosen = [samples[index] for index in members]
    members_S = np.array(members, dtype=np.int64)
    shared_S = shared_B[members_S]
    tokens_S = np.array([len(sample.token_ids) for sample in chosen], dtype=np.int64)
    sampled_S = np.array([len(sample.places) for sample in chosen], dtype=np.int64)
    own_S = tokens_S - shared_S
    lengths_S = _up_to(multiples[0], own_S)
    used = int(lengths_S.sum())
    padding = max(multiples[1], _up_to(multiples[1], used)) - used
    more = np.full(int(padding > 0), padding, np.int64)  # the last sequence
    tokens_T = np.full(used + padding, _PAD_TOKEN, np.int64)
    arrays = _row_values(chosen, weights.select(members_S), sampled_S)
    if not (kind.is_not_scored or kind.is_not_taught):
        arrays |= _served_scores([sample.teacher_scores for sample in chosen])
    places = paths(np.cumsum(lengths_S) - lengths_S, tokens_S, shared_S)
    for path, sample in zip(places, chosen, strict=True):
        tokens_T[path] = sample.token_ids
    if routing is not None:
        shape = (len(tokens_T), *routing)
        arrays["routed_experts_TYX"] = _routed_experts(chosen, places, shape)
    whole_S = np.append(lengths_S + shared_S, more)
    if shared_S.any():
        arrays["key_places_K"] = _join([*places, np.arange(used, used + padding)], np.int64)
        arrays["cu_seqlens_keys"] = _bounds(whole_S)
    token_index_N = _counters(sampled_S)
    arrays |= {
        "tokens_T": tokens_T,
        "positions_T": _counters(whole_S, np.append(shared_S, np.zeros_like(more))),
        "cu_seqlens": _bounds(np.append(lengths_S, more)),
        # Position p predicts p + 1: the first sampled token's row is the token before it.
        "rows_N": _join(
            [path[one.places - 1] for path, one in zip(places, chosen, strict=True)], np.int64
        ),
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
        max_seqlen=int(whole_S.max()),
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
    rows_N = np.arange(len(turn_N), dtype=np.int64)
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
    chosen: Sequence[Sample], places: Sequence[NDArray[np.int64]], shape: tuple[int, int, int]
) -> NDArray[np.int16]:
    """The engine's choices at the places of `chosen`, -1 elsewhere."""
    experts_TYX = np.full(shape, -1, dtype=np.int16)
    for path, sample in zip(places, chosen, strict=True):
        if sample.routed_experts is not None:
            experts_TYX[path[: len(sample.routed_experts)]] = sample.routed_experts
    return experts_TYX


def _up_to(multiple: int, lengths: Any) -> Any:
    """The next multiple of each length."""
    return -(-lengths // multiple) * multiple


def _join(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """All parts as one flat array."""
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def _bounds(lengths: NDArray[Any]) -> NDArray[np.int32]:
    """Where sequences of these lengths begin and end."""
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


def _counters(
    lengths: NDArray[np.int64], starts: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """start .. length - 1 for each length, concatenated; without `starts` from 0."""
    starts = np.zeros_like(lengths) if starts is None else starts
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    return _join([np.arange(*pair, dtype=np.int64) for pair in pairs], np.int64)
