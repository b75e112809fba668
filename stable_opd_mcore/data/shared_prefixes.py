"""Samples of a micro-batch that begin alike: their common tokens are computed once.

The rollouts of a prompt begin with it, and the contexts of an episode with what they have in
common. A sample after another one holds only the tokens that it does not share with it, and its
attention reads the keys of its whole path: the shared tokens, wherever they are, and its own.
Losses and gradients are those of whole sequences, to rounding. `train.share_prefixes`.

Letters: records.py; B samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.records import Sample

# Samples are put together where they share this part of a sample: below it, what they would save is
# lost again in copies of keys (BENCHMARKS.md).
LEAST_SHARE = 1 / 4


def put_together(
    samples: Sequence[Sample], members: Sequence[int], max_tokens: int, shared_B: NDArray[np.int64]
) -> list[list[int]]:
    """Groups of `members` that begin alike, each of at most `max_tokens` tokens computed.

    Sets in `shared_B` how many tokens a sample shares with the one before it in its group; each has
    at least one token of its own.
    """
    order = sorted(members, key=lambda index: samples[index].token_ids.astype(">i4").tobytes())
    groups: list[list[int]] = []
    room = 0
    for index in order:
        sample = samples[index]
        length = len(sample.token_ids)
        common = _common(samples[groups[-1][-1]], sample) if groups else 0
        if length * LEAST_SHARE <= common and length - common <= room:
            groups[-1].append(index)
            shared_B[index] = common
            room -= length - common
        else:
            groups.append([index])
            room = max_tokens - length
    return groups


def _common(one: Sample, other: Sample) -> int:
    """The tokens at the beginning of both, whose replayed experts are the same, but for the last
    token of `other`."""
    most = min(len(one.token_ids), len(other.token_ids) - 1)
    differ = one.token_ids[:most] != other.token_ids[:most]
    experts, others = one.routed_experts, other.routed_experts
    if (experts is None) != (others is None):
        return 0
    if experts is not None and others is not None:
        known = min(most, len(experts), len(others))
        differ[:known] |= (experts[:known] != others[:known]).any(axis=(1, 2))
        differ[known:] |= len(experts) != len(others)
    return int(differ.argmax()) if differ.any() else most


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
