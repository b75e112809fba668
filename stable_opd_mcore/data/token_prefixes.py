"""With how many tokens two sequences begin alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def in_token_order(token_ids: NDArray[np.int32]) -> bytes:
    """A key that sorts sequences by their tokens: each follows one that has most in common with it,
    of those before it."""
    return token_ids.astype(">i4").tobytes()


def first_true(is_other: NDArray[np.bool_]) -> int:
    """The place of the first True, or the length."""
    return int(is_other.argmax()) if is_other.any() else len(is_other)


def num_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """The number of tokens with which both begin."""
    length = min(len(a), len(b))
    return first_true(a[:length] != b[:length])
