"""Metrics that can be added: over micro-batches, over ranks, over the minibatches of a step.

A mean carries its count, so averages are never averaged; a maximum stays a maximum. `Metrics` maps
"area/name" keys to such values and merges key by key. `reduce_over_ranks` adds the metrics of a
group in rank order, so every rank gets the same result, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Mean:
    """total / count. The count may be any non-negative weight; a mean over zero is None."""

    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Sum:
    """A total over micro-batches and ranks."""

    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    """The largest value; None before the first. A NaN on either side stays a NaN."""

    maximum: float | None

    def __add__(self, other: Max) -> Max:
        if self.maximum is None or other.maximum is None:
            return other if self.maximum is None else self
        if self.maximum != self.maximum:
            return self
        return self if self.maximum >= other.maximum else other

    def value(self) -> float | None:
        return self.maximum


@dataclass(frozen=True)
class Same:
    """A global number that every rank computes in full: a quantile of the batch, a learning rate.

    Adding two equal numbers gives that number; adding different ones is an error.
    """

    number: float | None

    def __add__(self, other: Same) -> Same:
        both_nan = self.number != self.number and other.number != other.number
        if self.number != other.number and not both_nan:
            raise ValueError(
                f"two values of one number that must agree: {self.number!r} and {other.number!r}"
            )
        return self

    def value(self) -> float | None:
        return self.number


@dataclass(frozen=True)
class Quantile:
    """A quantile of integers, linear between neighbours as in numpy; None without any."""

    share: float
    values: tuple[int, ...]
    counts: tuple[int, ...]  # how often each of `values` occurs; a value may be listed twice

    def __add__(self, other: Quantile) -> Quantile:
        if self.share != other.share:
            raise ValueError(f"quantiles of {self.share} and {other.share}")
        return Quantile(self.share, self.values + other.values, self.counts + other.counts)

    def value(self) -> float | None:
        import numpy as np

        if not self.values:
            return None
        values = np.sort(np.repeat(self.values, self.counts))
        place = (len(values) - 1) * self.share
        below, above = (float(values[rank]) for rank in (math.floor(place), math.ceil(place)))
        return below + (above - below) * (place - math.floor(place))


Metric = Mean | Sum | Max | Same | Quantile


class Metrics(Mapping[str, Metric]):
    """Immutable mapping of key -> metric. `a | b` merges: keys of both sides add."""

    def __init__(self, items: Mapping[str, Metric] | None = None):
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> Metric:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, other: Metrics) -> Metrics:
        """Merge; a ValueError if a key holds two kinds (a mean and a sum), or a `Same` differs."""
        merged = dict(self._items)
        for key, metric in other.items():
            merged[key] = _add(key, merged[key], metric) if key in merged else metric
        return Metrics(merged)

    def __repr__(self) -> str:
        return f"Metrics({self._items!r})"

    def values_by_key(self) -> dict[str, float | None]:
        """Plain numbers, keys sorted; None where a metric is undefined (a mean over nothing)."""
        return {key: self._items[key].value() for key in sorted(self._items)}


def _add(key: str, left: Any, right: Any) -> Metric:
    if type(left) is not type(right):
        kinds = " and a ".join(type(metric).__name__.lower() for metric in (left, right))
        raise ValueError(f"metric {key}: cannot add a {kinds}")
    try:
        return left + right
    except ValueError as error:
        raise ValueError(f"metric {key}: {error}") from error


def reduce_over_ranks(metrics: Metrics, group: ProcessGroup | None) -> Metrics:
    """Add the metrics of all ranks of `group` in rank order; every rank gets the same result.

    Ranks may hold different keys, and a rank without metrics passes an empty `Metrics`. So `group`
    may be the whole world where several ranks hold the same tokens, as long as one of them
    contributes. `group` None or of one rank: `metrics` itself.

    Raises:
        ValueError: a key holds different kinds on different ranks, or a `Same` that differs.
    """
    import torch.distributed as dist

    if group is None or dist.get_world_size(group) == 1:
        return metrics
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(  # pyright: ignore[reportUnknownMemberType]
        gathered, dict(metrics), group=group
    )
    total = Metrics()
    for contribution in gathered:
        total = total | Metrics(contribution)
    return total
