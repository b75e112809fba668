"""Share out the samples of a step: over minibatches, and over data-parallel ranks.

Suffixes of names: records.py; P prompts, U units that are shared out whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.sample_facts import SampleFacts


def split_by_prompt(facts: SampleFacts, parts: int) -> list[NDArray[np.int64]]:
    """Places of the samples of at most `parts` minibatches: prompt i goes to minibatch i modulo
    `parts`, with all its samples.
    """
    _, first_P, prompt_B = np.unique(facts.slot_B, return_index=True, return_inverse=True)
    order_P = np.argsort(np.argsort(first_P))  # a prompt's place in the order of appearance
    split = [np.flatnonzero(order_P[prompt_B] % parts == part) for part in range(parts)]
    return [part for part in split if len(part)]


def partition(
    costs_B: NDArray[np.float64],
    parts: int,
    first_B: NDArray[np.bool_] | bool = True,
    prompt_B: NDArray[np.int64] | None = None,
) -> list[list[int]]:
    """Places of the sequences of each part, balanced by cost: those of `first_B`, and all together.

    Those of `first_B` come first, the costliest first; each goes to the part with the lowest sum.
    Those of one prompt go together, unless they cost more than half of what a part has.
    """
    loads = [(0.0, part) for part in range(parts)]  # a heap
    shares: list[list[int]] = [[] for _ in range(parts)]
    first_B = np.broadcast_to(first_B, len(costs_B))
    units = [[index] for index in range(len(costs_B))]
    if prompt_B is not None:
        most = costs_B.sum() / parts / 2
        units = list(_units(costs_B, np.lexsort((first_B, prompt_B)), (first_B, prompt_B), most))
    costs_U = np.array([costs_B[unit].sum() for unit in units])
    order_U = np.lexsort((-costs_U, ~first_B[[unit[0] for unit in units]]))
    order: list[int] = order_U.tolist()
    for unit in (units[index] for index in order):
        load, part = loads[0]
        heapq.heapreplace(loads, (load + float(costs_B[unit].sum()), part))
        shares[part].extend(unit)
    return shares


def _units(
    costs_B: NDArray[np.float64],
    order_B: NDArray[np.int64],
    keys: Sequence[NDArray[Any]],
    most: float,
) -> Iterator[list[int]]:
    """Neighbours in `order_B` with equal keys, as long as they cost at most `most`."""
    unit: list[int] = []
    cost = 0.0
    for index in order_B.tolist():
        alike = unit and all(key[index] == key[unit[0]] for key in keys)
        if unit and not (alike and cost + costs_B[index] <= most):
            yield unit
            unit, cost = [], 0.0
        unit.append(index)
        cost += costs_B[index]
    if unit:
        yield unit
