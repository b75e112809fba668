"""Orders the kept rows, and divides them into supervised rows and prompts of the distillation.

The order is that of a hash of the seed and the normalised problem: a shuffle that depends on
nothing else. Rows with the same normalised problem stay together, so that no distillation prompt is
trained on in the supervised run. Not here: the texts, which stay in the parts' files (spool.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.preparation.spool import KeptRow


@dataclass
class KeptTable:
    """All kept rows in the order of the input, as columns: about 40 bytes a row."""

    keys: array[int] = field(default_factory=lambda: array("Q"))
    parts: array[int] = field(default_factory=lambda: array("L"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("L"))
    problem_tokens: array[int] = field(default_factory=lambda: array("L"))
    solution_tokens: array[int] = field(default_factory=lambda: array("L"))

    def extend(self, part: int, rows: Iterable[KeptRow]) -> None:
        for row in rows:
            self.keys.append(int(row.key, 16))
            self.parts.append(part)
            self.offsets.append(row.offset)
            self.lengths.append(row.length)
            self.problem_tokens.append(row.problem_tokens)
            self.solution_tokens.append(row.solution_tokens)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_repeated(self) -> int:
        """Rows whose normalised problem stands in an earlier row."""
        return len(self) - len(set(self.keys))


def shuffled(table: KeptTable, seed: int) -> list[int]:
    """The rows' numbers in the order of the hash; rows of one problem in the input's order."""

    def rank(row: int) -> bytes:
        text = f"{seed}/{table.keys[row]:016x}".encode()
        return hashlib.blake2b(text, digest_size=8).digest()

    return sorted(range(len(table)), key=rank)


def split_rows(
    table: KeptTable, order: Sequence[int], num_first: int
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
    position = 0
    while position < len(order):
        end = position + 1
        while end < len(order) and table.keys[order[end]] == table.keys[order[position]]:
            end += 1
        group = order[position:end]
        (first if len(first) + len(group) <= num_first else second).extend(group)
        position = end
    return first, second
