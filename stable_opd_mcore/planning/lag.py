"""Seconds that a trainer waits for servers, by rollout.max_staleness (K) and rollout.partial.

A model of a steady run, in closed form; `benchmarks/rollout_schedule.py` runs the same schedules on
a clock of events, and docs/planning.md compares. Not here: the parts of a step (seconds.py).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Drawing:
    """What one step's responses take on one server."""

    step: float  # seconds of a decoding step: weights and overhead
    longest: float  # tokens of the longest response
    tokens: float  # of all responses together
    work: float  # seconds of their caches, products and prompts
    slots: float  # responses that may run at a time
    again: float = 0.0  # seconds of a prefill of a response in flight

    def together(self, batches: int) -> float:
        """Seconds until as many steps' responses have ended that start together."""
        steps = max(self.longest, batches * self.tokens / self.slots)
        return steps * self.step + batches * self.work


def publish_every(max_staleness: int, partial: bool) -> int:
    """Updates from one publish to the next."""
    return 1 if partial else max(1, max_staleness - 1)


def waiting_seconds(
    draw: Drawing, busy: float, publish: float, max_staleness: int, partial: bool
) -> float:
    """Seconds of a step in which the trainer waits for responses.

    Args:
        busy: seconds of a step in which the trainer computes.
        publish: seconds of one publish.
    """
    if not max_staleness:
        return draw.together(1)
    if partial:
        return _shortest_step(draw, busy, publish, max_staleness) - busy - publish
    # A publish waits for all responses, then those of `every` steps start together.
    every = publish_every(max_staleness, partial)
    at_hand = max_staleness - every + 1  # steps whose responses have ended at the publish
    drawn, missing = draw.together(every), max(0, every - at_hand)
    cycle = max(every * busy, drawn, max(at_hand * busy, drawn) + missing * busy if missing else 0)
    return cycle / every - busy


def _shortest_step(draw: Drawing, busy: float, publish: float, max_staleness: int) -> float:
    """The shortest step that servers and the longest response can keep, by bisection."""
    low = busy + publish
    if _keeps(draw, busy, publish, max_staleness, low):
        return low
    high = 2 * low + draw.together(1)
    while not _keeps(draw, busy, publish, max_staleness, high):
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        kept = _keeps(draw, busy, publish, max_staleness, middle)
        low, high = (low, middle) if kept else (middle, high)
    return high


def _keeps(draw: Drawing, busy: float, publish: float, max_staleness: int, step: float) -> bool:
    """Whether steps of so many seconds can go on.

    With b running responses a server takes tokens/b decoding steps and b prefills a step:

        step - publish = work + tokens / b * draw.step + b * again

    The longest response has max_staleness steps and the wait of its own; the work of the others
    makes its decoding steps longer.
    """
    draws = step - publish
    free, decoding = draws - draw.work, draw.tokens * draw.step
    rest = free**2 - 4 * draw.again * decoding
    if free <= 0 or rest < 0:
        return False
    running = 2 * decoding / (free + math.sqrt(rest))
    decoding_step = draws * running / draw.tokens
    has = max_staleness * draws + step - busy - publish
    return running <= draw.slots and draw.longest * decoding_step <= has
