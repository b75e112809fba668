"""Pack the global list of samples into the micro-batches of one data-parallel rank.

Every rank holds the same samples and weights, and partition and packing are pure functions of them:
all ranks agree without communication, and each builds only its own tensors. The token weights
contain the global normaliser, so the loss does not depend on the micro-batch of a sample.

Sequences lie end to end, and cu_seqlens holds their bounds. Tokens that fill a micro-batch up to a
multiple are a last sequence without loss rows. Context parallelism needs every sequence to be a
multiple; its filling tokens stand at its end, where causal attention hides them from the others.

Not here: the slices of context parallelism (parallel/context.py). Suffixes of names: records.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stable_opd_mcore.records import MicroBatch, Sample, TokenWeights

_PAD_TOKEN = 0  # any valid id: no loss reads it and no token attends to it


def pack(
    samples: Sequence[Sample],
    weights: Sequence[TokenWeights],
    *,
    max_tokens: int,
    data_rank: int,
    data_size: int,
    attention_length: float = math.inf,
    pad_to_multiple: int = 1,
    sequence_multiple: int = 1,
    microbatch_multiple: int = 1,
    device: str | torch.device = "cpu",
) -> list[MicroBatch]:
    """This rank's micro-batches; every data-parallel rank gets the same number of them.

    Args:
        samples: the global list, the same on every rank. Samples of weight zero are packed too,
            for the metrics.
        weights: one per sample, one value per response token.
        max_tokens: limit of T; a longer sequence is a micro-batch of its own.
        attention_length: tokens of a sequence whose attention costs as much as all else
            (Architecture.attention_length). Ranks and micro-batches are balanced by this cost.
        pad_to_multiple: T is a multiple of this (World.token_multiple).
        sequence_multiple: every sequence's length is a multiple of this
            (World.sequence_multiple).
        microbatch_multiple: the number of micro-batches is a multiple of this; interleaved
            pipelines need the pipeline size.

    Returns:
        Micro-batches whose sample_index_N indexes `samples`; those without samples have N = 0.

    Raises:
        ValueError: a sample without a prompt, or whose number of weights or masks differs from its
            number of response tokens.
    """
    for index, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        _check(index, sample, weight)
    lengths = np.array([_length(sample) for sample in samples], dtype=np.int64)
    lengths = _up_to(sequence_multiple, lengths)
    costs = lengths * (1 + lengths / attention_length)
    shares = partition(costs, data_size)
    plans = [fill(lengths, share, max_tokens) for share in shares]
    count = max(1, *(len(plan) for plan in plans))
    count = -(-count // microbatch_multiple) * microbatch_multiple
    mine = level(lengths, costs, plans[data_rank], count, max_tokens)
    advantages_given = any(weight.advantage is not None for weight in weights)
    multiples = (sequence_multiple, math.lcm(sequence_multiple, pad_to_multiple))
    return [
        _build(samples, weights, members, multiples, advantages_given, device) for members in mine
    ]


def partition(costs: np.ndarray, parts: int) -> list[list[int]]:
    """Indices of the sequences of each part, balanced by cost.

    The costliest sequence comes first, each goes to the part with the lowest sum, ties to the lower
    part.
    """
    loads = [0.0] * parts
    shares: list[list[int]] = [[] for _ in range(parts)]
    for index in np.argsort(-costs, kind="stable").tolist():
        part = loads.index(min(loads))
        loads[part] += float(costs[index])
        shares[part].append(index)
    return shares


def fill(lengths: np.ndarray, members: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each member into the first bin with room for it, at most max_tokens in a bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in members:
        length = int(lengths[index])
        place = next((k for k, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([index])
            room.append(max_tokens - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return bins


def level(
    lengths: np.ndarray,
    costs: np.ndarray,
    bins: Sequence[Sequence[int]],
    count: int,
    max_tokens: int,
) -> list[list[int]]:
    """The members of bins in `count` bins of about equal cost, still at most max_tokens in a bin.

    Pipeline stages wait for the costliest micro-batch, and the last of `fill` may be nearly empty.
    The costliest member comes first, each goes to the bin with the lowest sum that has room. Where
    one finds no room, the bins stay as they are; missing bins are empty.
    """
    levelled: list[list[int]] = [[] for _ in range(count)]
    loads, used = [0.0] * count, [0] * count
    for index in sorted((i for members in bins for i in members), key=lambda i: -costs[i]):
        length = int(lengths[index])
        open_bins = [k for k in range(count) if not used[k] or used[k] + length <= max_tokens]
        if not open_bins:
            return [list(members) for members in bins] + [[]] * (count - len(bins))
        place = min(open_bins, key=lambda k: loads[k])
        levelled[place].append(index)
        loads[place] += float(costs[index])
        used[place] += length
    return levelled


def _length(sample: Sample) -> int:
    return len(sample.prompt_token_ids) + len(sample.response_token_ids)


def _check(index: int, sample: Sample, weight: TokenWeights) -> None:
    if not sample.prompt_token_ids:
        raise ValueError(
            f"sample {index} ({sample.prompt_id}) has an empty prompt: "
            "nothing predicts its first token"
        )
    expected = len(sample.response_token_ids)
    for name, values in (
        ("trained", sample.trained),
        ("rollout_logprobs", sample.rollout_logprobs),
        ("repetitive", sample.repetitive),
        ("pg", weight.pg),
        ("kl", weight.kl),
        ("sft", weight.sft),
        ("advantage", weight.advantage),
    ):
        if values is not None and len(values) != expected:
            raise ValueError(
                f"sample {index} ({sample.prompt_id}) has {len(values)} values of {name} for "
                f"{expected} response tokens"
            )


def _build(
    samples: Sequence[Sample],
    weights: Sequence[TokenWeights],
    members: Sequence[int],
    multiples: tuple[int, int],  # of a sequence's length, of T
    advantages_given: bool,
    device: str | torch.device,
) -> MicroBatch:
    chosen = [samples[index] for index in members]
    chosen_weights = [weights[index] for index in members]
    prompts_S = np.array([len(sample.prompt_token_ids) for sample in chosen], dtype=np.int64)
    responses_S = np.array([len(sample.response_token_ids) for sample in chosen], dtype=np.int64)
    lengths_S = _up_to(multiples[0], prompts_S + responses_S)
    tails_S = lengths_S - prompts_S - responses_S
    used = int(lengths_S.sum())
    padding = max(multiples[1], _up_to(multiples[1], used)) - used
    sequences_S = np.append(lengths_S, padding) if padding else lengths_S
    starts_S = np.cumsum(lengths_S) - lengths_S
    tokens = [
        part
        for sample, tail in zip(chosen, tails_S.tolist(), strict=True)
        for part in (sample.prompt_token_ids, sample.response_token_ids, (_PAD_TOKEN,) * tail)
    ]
    tokens_T = _join([*tokens, (_PAD_TOKEN,) * padding], np.int64)
    positions_T = _counters(sequences_S)
    token_index_N = _counters(responses_S)
    # The token at position p predicts p + 1: the prompt's last token predicts the response's first.
    rows_N = np.repeat(starts_S + prompts_S - 1, responses_S) + token_index_N

    def of_weights(name: str) -> np.ndarray:
        return _join([getattr(weight, name) for weight in chosen_weights], np.float32)

    def or_zeros(values: Sequence[Sequence[float] | None], dtype: type[np.generic]) -> np.ndarray:
        filled = [
            (0,) * int(n) if v is None else v for v, n in zip(values, responses_S, strict=True)
        ]
        return _join(filled, dtype)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

    given = [weight.advantage for weight in chosen_weights]
    return MicroBatch(
        tokens_T=tensor(tokens_T),
        positions_T=tensor(positions_T),
        cu_seqlens=tensor(np.append(0, np.cumsum(sequences_S)).astype(np.int32)),
        max_seqlen=int(sequences_S.max()),
        rows_N=tensor(rows_N),
        targets_N=tensor(tokens_T[rows_N + 1]),
        sample_index_N=tensor(np.repeat(np.array(members, dtype=np.int64), responses_S)),
        token_index_N=tensor(token_index_N),
        pg_weight_N=tensor(of_weights("pg")),
        kl_weight_N=tensor(of_weights("kl")),
        sft_weight_N=tensor(of_weights("sft")),
        rollout_logprob_N=tensor(
            or_zeros([sample.rollout_logprobs for sample in chosen], np.float32)
        ),
        repetitive_N=tensor(or_zeros([sample.repetitive for sample in chosen], np.bool_)),
        given_advantage_N=tensor(or_zeros(given, np.float32)) if advantages_given else None,
    )


def _up_to(multiple: int, lengths: Any) -> Any:
    """The next multiple of each length."""
    return -(-lengths // multiple) * multiple


def _join(parts: Sequence[Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    """All parts as one flat array."""
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _counters(lengths: np.ndarray) -> np.ndarray:
    """0 .. length - 1 for each length, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(ends - lengths, lengths)
