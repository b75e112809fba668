"""Orders the kept rows, and divides them into supervised rows and prompts of the distillation.

The order is that of a hash of the seed and the normalised problem: a shuffle that depends on
nothing else. Rows with the same normalised problem stay together, so that no distillation prompt is
trained on in the supervised run.
"""

import hashlib
from collections.abc import Sequence
from itertools import groupby

from stable_opd_mcore.data.decontamination import problem_key
from stable_opd_mcore.errors import DataError


def row_key(problem: str) -> str:
    """16 hex digits, hashed from the normalised problem: near-duplicates share them."""
    return hashlib.blake2b(problem_key(problem).encode(), digest_size=8).hexdigest()


def shuffled(keys: Sequence[str], rows: Sequence[int], seed: int) -> list[int]:
    """The rows in the order of the hash; rows of one problem in the input's order.

    Args:
        keys: `row_key` of every row of the input.
        rows: numbers of those that are ordered.
    """

    def rank(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{keys[row]}".encode(), digest_size=8).digest()

    return sorted(rows, key=rank)


def split_rows(
    keys: Sequence[str], order: Sequence[int], num_first: int
) -> tuple[list[int], list[int]]:
    """The first `num_first` rows of the order, and the others; rows of one problem stay together.

    Raises:
        DataError: fewer than num_first + 1 rows.
    """
    if len(order) <= num_first:
        raise DataError(
            f"{len(order)} rows are kept, which is too few for {num_first} supervised rows and "
            f"the prompts of the distillation; lower --sft-rows below {len(order)}, raise "
            "--max-tokens, or give more data with --source"
        )
    first: list[int] = []
    second: list[int] = []
    for _, group in groupby(order, key=keys.__getitem__):
        rows = list(group)
        (first if len(first) + len(rows) <= num_first else second).extend(rows)
    return first, second
