"""Metrics that know how they add: over micro-batches, over ranks, over inner steps.

A mean carries its count, so averages are never averaged; a maximum stays a maximum. `Metrics` maps
"area/name" keys to such values, merges key by key, and `reduce_over_ranks` gives every rank of a
group the same result, bit for bit, because each adds the same numbers in rank order.

Not a logger and not a registry: monitoring/names.py lists the keys, monitoring/sinks.py writes them
to files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Mean:
    """total / count; undefined (None) while the count, any non-negative weight, is zero."""

    kind: ClassVar[str] = "mean"
    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Sum:
    """A total over micro-batches and ranks."""

    kind: ClassVar[str] = "sum"
    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    """The largest value seen; None where nothing was seen. A NaN on either side stays."""

    kind: ClassVar[str] = "max"
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
    """A number that every contributor already knows in full (a quantile of the global batch, the
    step's learning rate). It does not add: two different values under one key are an error."""

    kind: ClassVar[str] = "same"
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


Metric = Mean | Sum | Max | Same
_KINDS: dict[str, type[Metric]] = {kind.kind: kind for kind in (Mean, Sum, Max, Same)}


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
        """Merge.

        Raises:
            ValueError: one key holds two kinds (a mean here, a sum there), or a `Same` differs.
        """
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
    if left.kind != right.kind:
        raise ValueError(f"metric {key}: cannot add a {left.kind} and a {right.kind}")
    try:
        return left + right
    except ValueError as error:
        raise ValueError(f"metric {key}: {error}") from error


def encode(metrics: Metrics) -> bytes:
    """As JSON bytes that `decode` reads back exactly: floats in round-trip form, NaN included."""
    rows = [
        [key, metric.kind, list(vars(metric).values())] for key, metric in sorted(metrics.items())
    ]
    return json.dumps(rows).encode()


def decode(data: bytes) -> Metrics:
    return Metrics({key: _KINDS[kind](*fields) for key, kind, fields in json.loads(data)})


def reduce_over_ranks(
    metrics: Metrics, group: ProcessGroup | None, device: torch.device | str = "cpu"
) -> Metrics:
    """Add the metrics of all ranks of `group`; every rank gets the same result, bit for bit.

    Ranks may hold different keys: a rank with nothing to say (a pipeline stage without the loss,
    a tensor-parallel twin of a rank that already speaks) passes an empty `Metrics` and still gets
    the result. So `group` may be the whole world as long as one rank alone reports each token.

    The metrics travel as one padded byte tensor per rank (a few KiB) after an exchange of lengths;
    `device` is where the group's backend wants it. `group` None: nothing to do.

    Raises:
        ValueError: a key holds different kinds on different ranks, or a `Same` that differs.
    """
    import torch
    import torch.distributed as dist

    if group is None or dist.get_world_size(group) == 1:
        return metrics
    payload = encode(metrics)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(item) for item in torch.cat(sizes).tolist()]

    packed = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    packed[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(packed) for _ in lengths]
    dist.all_gather(gathered, packed, group=group)

    total = Metrics()
    for length, data in zip(lengths, gathered, strict=True):
        total = total | decode(data[:length].cpu().numpy().tobytes())
    return total
