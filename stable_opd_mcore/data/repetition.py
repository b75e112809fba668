"""Which tokens of a response are its repetitive tail: the maximal periodic suffix (METHOD §5).

Not the repetition rate of whole responses, which works on text and compression: see
monitoring/health.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stable_opd_mcore.errors import UserError

_PREFILTER = 16  # tokens compared before a period is worth a comparison over the whole response


def periodic_suffix(token_ids: Sequence[int], max_period: int = 1024, min_repeats: int = 3) -> int:
    """Length of the longest suffix with a period <= max_period, repeated min_repeats times or more.

    A suffix of length L has period p when each of its tokens equals the one p places before, within
    the suffix; it counts when L >= min_repeats * p. The last repeat may be incomplete. 0 where
    there is none.

    Cost: a few vectorised passes over max_period candidates, then one comparison over the response
    per surviving period that is no multiple of one already found.
    """
    if min_repeats < 2:
        raise UserError(
            f"min_repeats={min_repeats}: a single occurrence is no repetition, use 2 or more"
        )
    # Reversed, the suffix is a prefix: it has period p when the text agrees for L - p tokens with
    # itself moved by p.
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
        # A unit made of whole smaller units repeats exactly as far as the smaller one does.
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
    """Per token of a response: inside the maximal periodic suffix."""
    length = periodic_suffix(token_ids, max_period, min_repeats)
    return (False,) * (len(token_ids) - length) + (True,) * length
