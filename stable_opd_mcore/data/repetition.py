"""The repetitive tail of a response: its maximal periodic suffix of tokens (docs/method.md §5).

Not here: the repetition rate of responses, which is a compression ratio of their text
(monitoring/health.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PREFILTER = 16  # tokens compared for all periods at once, before each is compared in full


def periodic_suffix(token_ids: Sequence[int], max_period: int = 1024, min_repeats: int = 3) -> int:
    """Length in tokens of the longest suffix with a period of at most max_period; 0 for none.

    A suffix of length L has period p if each of its tokens equals the token p places before it
    inside the suffix. It counts if L >= min_repeats * p; the last repeat may be incomplete.

    Cost: at most 16 vectorised passes over the periods, then one comparison over the response for
    each remaining period that is no multiple of one that was found.
    """
    if min_repeats < 2:
        raise ValueError(f"min_repeats={min_repeats}: a repetition needs 2 or more")
    # The reversed suffix is a prefix. It has period p if its first L - p tokens equal the L - p
    # tokens that begin at place p.
    reversed_T = np.asarray(token_ids)[::-1]
    total = len(reversed_T)
    candidates = np.arange(1, min(max_period, total // min_repeats) + 1)
    for offset in range(min(_PREFILTER, total)):
        needed = offset < (min_repeats - 1) * candidates
        ahead = np.minimum(candidates + offset, total - 1)
        candidates = candidates[~needed | (reversed_T[ahead] == reversed_T[offset])]
        if not len(candidates):
            return 0
    found: list[tuple[int, int]] = []  # (period, length of its suffix)
    for period in candidates.tolist():
        # A multiple of a period has the same suffix as the period itself.
        if any(period % smaller == 0 and period <= length for smaller, length in found):
            continue
        differs = reversed_T[period:] != reversed_T[: total - period]
        agree = int(differs.argmax()) if differs.any() else total - period
        if agree >= (min_repeats - 1) * period:
            found.append((period, agree + period))
    return max((length for _, length in found), default=0)


def repetitive_mask(
    token_ids: Sequence[int], max_period: int = 1024, min_repeats: int = 3
) -> tuple[bool, ...]:
    """Per response token: True inside the maximal periodic suffix."""
    length = periodic_suffix(token_ids, max_period, min_repeats)
    return (False,) * (len(token_ids) - length) + (True,) * length
