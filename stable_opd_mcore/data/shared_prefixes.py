"""Samples of a micro-batch that begin alike: their common tokens are computed once.

The rollouts of a prompt begin with it, and the contexts of an episode with what they have in
common. A sample after another one holds only the tokens that it does not share with it, and its
attention reads the keys of its whole path: the shared tokens, wherever they are, and its own.
Losses and gradients are those of whole sequences, to rounding. `train.share_prefixes`.

Letters: records.py; B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.token_prefixes import first_true, in_token_order, num_common
from stable_opd_mcore.records import Sample

# Samples are put together where they share this part of a sample: below it, what they would save is
# lost again in copies of keys (BENCHMARKS.md).
LEAST_SHARE = 1 / 4


def put_together(
    samples: Sequence[Sample], kinds: Sequence[Any], max_tokens: int
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Groups of samples of one kind that begin alike, as their places in `samples`.

    Returns:
        Groups of at most `max_tokens` tokens that are computed, each in the order in which samples
        share; and [B] how many tokens a sample shares with the one before it in its group. Each
        sample has at least one token of its own.
    """
    shared_B = np.zeros(len(samples), np.int64)
    groups: list[list[int]] = []
    room = 0
    for index in sorted(
        range(len(samples)), key=lambda i: (kinds[i], in_token_order(samples[i].token_ids))
    ):
        length = len(samples[index].token_ids)
        common = 0
        if groups and kinds[groups[-1][-1]] == kinds[index]:
            common = _num_shared(samples[groups[-1][-1]], samples[index])
        if length * LEAST_SHARE <= common and length - common <= room:
            groups[-1].append(index)
            shared_B[index] = common
            room -= length - common
        else:
            groups.append([index])
            room = max_tokens - length
    return groups, shared_B


def _num_shared(one: Sample, other: Sample) -> int:
    """The tokens with which both begin and whose replayed experts are the same; never the last
    token of `other`."""
    common = min(num_common(one.token_ids, other.token_ids), len(other.token_ids) - 1)
    experts, others = one.routed_experts, other.routed_experts
    if experts is None and others is None:
        return common
    if experts is None or others is None:
        return 0
    known = min(common, len(experts), len(others))
    alike = first_true((experts[:known] != others[:known]).any(axis=(1, 2)))
    return common if alike == known and len(experts) == len(others) else alike


def paths(
    starts_S: NDArray[np.int64], tokens_S: NDArray[np.int64], shared_S: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """The places of each sequence's tokens among the packed ones.

    Args:
        starts_S: where the tokens of its own begin.
        tokens_S: the tokens of the whole sequence.
        shared_S: how many of them are those of the sequence before it.
    """
    found: list[NDArray[np.int64]] = []
    path: NDArray[np.int64] = np.empty(0, np.int64)
    for start, tokens, shared in zip(
        *map(np.ndarray.tolist, (starts_S, tokens_S, shared_S)), strict=True
    ):
        own = np.arange(start, start + tokens - shared, dtype=np.int64)
        path = np.concatenate([path[:shared], own])
        found.append(path)
    return found
