"""The two detectors of repetition: loops of tokens, and the paper's rate (docs/method.md §5)."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_LOOP_TOKENS = 32  # longer than in any healthy text: docs/evidence/repetition.md
LEAST_LOOP_TOKENS = 8  # the minimum under any budget
MAX_PERIOD_TOKENS = 1024
# The same limits for a text without token ids.
MIN_LOOP_CHARACTERS = 64
MAX_PERIOD_CHARACTERS = 4096

PAPER_TAIL_CHARACTERS = 10_000
ZLIB_LEVEL = 6

_PREFILTER = 16  # tokens compared for all periods at once, before each is compared in full


@dataclass(frozen=True)
class TailLoop:
    """The loop that a response ends in; both numbers are 0 without one."""

    length: int = 0  # tokens (or characters) of the loop, its incomplete last repeat included
    period: int = 0  # tokens (or characters) of one repeat


def min_loop_tokens(max_new_tokens: int | None) -> int:
    """The fewest tokens of a loop: a quarter of a small budget, because the budget cuts loops."""
    if max_new_tokens is None:
        return MIN_LOOP_TOKENS
    return max(LEAST_LOOP_TOKENS, min(MIN_LOOP_TOKENS, max_new_tokens // 4))


def tail_loop(
    token_ids: Sequence[int] | np.ndarray,
    max_period: int = MAX_PERIOD_TOKENS,
    min_repeats: int = 3,
    min_length: int = MIN_LOOP_TOKENS,
) -> TailLoop:
    """The longest suffix with a period of at most max_period, and its smallest period.

    A suffix of length L has period p if each of its tokens equals the token p places before it
    inside the suffix. It counts if L >= min_repeats * p and L >= min_length; the last repeat may be
    incomplete. Cost: at most 16 vectorised passes over the periods, then few comparisons.
    """
    total = len(token_ids)
    if total < min_length:
        return TailLoop()
    # The reversed suffix is a prefix. It has period p if its first L - p tokens equal the L - p
    # tokens that begin at place p.
    end = np.asarray(token_ids[max(0, total - max_period - _PREFILTER) :])[::-1]
    candidates = np.arange(1, min(max_period, total // min_repeats) + 1)
    shortest = np.maximum(min_repeats * candidates, min_length)
    for offset in range(min(_PREFILTER, total)):
        ahead = np.minimum(candidates + offset, len(end) - 1)
        kept = (offset >= shortest - candidates) | (end[ahead] == end[offset])
        candidates, shortest = candidates[kept], shortest[kept]
        if not len(candidates):
            return TailLoop()
    reversed_T = np.asarray(token_ids)[::-1]
    found: list[TailLoop] = []
    for period, least in zip(candidates.tolist(), shortest.tolist(), strict=True):
        # A multiple of a period has the same suffix as the period itself.
        if any(period % loop.period == 0 and period <= loop.length for loop in found):
            continue
        differs = reversed_T[period:] != reversed_T[: total - period]
        agree = int(differs.argmax()) if differs.any() else total - period
        if agree + period >= least:
            found.append(TailLoop(agree + period, period))
    return max(found, key=lambda loop: loop.length, default=TailLoop())


def tail_loop_of_text(text: str) -> TailLoop:
    """The loop of a text whose tokens are not known; lengths in characters."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return tail_loop(characters, MAX_PERIOD_CHARACTERS, min_length=MIN_LOOP_CHARACTERS)


def is_repetitive(text: str, tail_characters: int, ratio: float) -> bool | None:
    """Whether zlib shortens the last `tail_characters` of `text`, in UTF-8, by more than `ratio`.

    None for a text of up to `tail_characters` characters, which the paper's rate counts as no.
    """
    if len(text) <= tail_characters:
        return None
    tail = text[-tail_characters:].encode("utf-8", "surrogatepass")
    return len(tail) > ratio * len(zlib.compress(tail, ZLIB_LEVEL))
