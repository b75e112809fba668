"""Give a module the value of its micro-batch, also when activation recompute runs it again.

    of_microbatch = OfMicrobatch[Tensor]()
    of_microbatch.begin(value, keeps=True)  # before the forward pass of the chunk
    of_microbatch.current()                 # in the module: in this pass, and where it runs again
    of_microbatch.end()

The second run comes inside the backward pass, maybe after forward passes of other micro-batches.
The micro-batches of a chunk are computed backward in their order, so a queue knows whose it is.
Each module has an object of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class OfMicrobatch(Generic[Value]):
    """A value between `begin` and `end`, and again for each run of the module by recompute."""

    def __init__(self) -> None:
        self._value: Value | None = None
        self._keeps = False
        self._for_recompute: deque[Value] = deque()

    def begin(self, value: Value, *, keeps: bool) -> None:
        """
        Args:
            keeps: a backward pass follows.
        """
        self._value, self._keeps = value, keeps

    def end(self) -> None:
        self._value = None

    @property
    def is_first_run(self) -> bool:
        """Whether the forward pass itself runs the module, and not recompute."""
        return self._value is not None

    def current(self) -> Value | None:
        """Called once in each run of the module; None where it runs for another purpose."""
        if self._value is None:
            return self._for_recompute.popleft() if self._for_recompute else None
        if self._keeps and not torch.is_grad_enabled():  # recompute: this pass records nothing
            self._for_recompute.append(self._value)
        return self._value
