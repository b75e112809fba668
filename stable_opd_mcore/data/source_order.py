"""The order of prompts of several sources: each slot takes the source furthest behind its share.

The n-th slot of a run, from 0, takes the source s with the largest w_s (n + 1) - (its slots so
far), or the first of several; w_s is its share of the weights.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.prompts import PromptOrder
from stable_opd_mcore.errors import UserError


class SourceOrder:
    """An endless, seeded order of the rows of several sources, which follow each other.

    Args:
        sizes: rows of each source, by its name.
        per_step: slots of a step, in which no row occurs twice.

    Raises:
        UserError: a step could need more rows of a source than there are.
    """

    def __init__(
        self, sizes: Mapping[str, int], weights: Sequence[float], seed: int, per_step: int
    ):
        self._shares = np.array(weights) / sum(weights)
        self._ends = np.cumsum([0, *sizes.values()])
        self._per_step = per_step
        self._source_of: list[int] = []  # the source of every slot so far
        self._slots: list[list[int]] = [[] for _ in sizes]  # those of each source
        for (name, size), share in zip(sizes.items(), self._shares, strict=True):
            most = min(per_step, int(np.ceil(share * per_step)) + 1)
            if size < most:
                raise UserError(
                    f"data.train: {name} has {size} usable rows, and a step may need {most} of "
                    f"them ({share:.3g} of {per_step} prompts): lower its weight or "
                    "rollout.prompts_per_step, or add rows"
                )
        self._orders = [
            PromptOrder(size, seed + source, step_of=partial(self._step_of, source))
            for source, size in enumerate(sizes.values())
        ]

    def sources(self, slots: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The source of each slot's prompt."""
        self._extend(int(slots.max()) + 1)
        return np.array([self._source_of[slot] for slot in slots.tolist()], np.int64)

    def indices(self, cursor: int, count: int) -> list[int]:
        """Rows of slots cursor .. cursor + count - 1, however that range is split into calls."""
        self._extend(cursor + count)
        rows: list[int] = []
        for slot in range(cursor, cursor + count):
            source = self._source_of[slot]
            place = bisect_left(self._slots[source], slot)
            rows.append(int(self._ends[source]) + self._orders[source].indices(place, 1)[0])
        return rows

    def _extend(self, end: int) -> None:
        counts = np.array([len(slots) for slots in self._slots])
        for slot in range(len(self._source_of), end):
            source = int(np.argmax(self._shares * (slot + 1) - counts))
            counts[source] += 1
            self._source_of.append(source)
            self._slots[source].append(slot)

    def _step_of(self, source: int, place: int) -> tuple[int, int]:
        """The first slot of a source in the step that has its slot number `place`, and the first in
        the next step.
        """
        slots = self._slots[source]
        while len(slots) <= place:
            self._extend(len(self._source_of) + self._per_step)
        start = slots[place] - slots[place] % self._per_step
        self._extend(start + self._per_step)
        return bisect_left(slots, start), bisect_left(slots, start + self._per_step)
