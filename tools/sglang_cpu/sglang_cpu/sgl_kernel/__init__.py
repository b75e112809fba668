"""A replacement for the sgl_kernel package, which has no CPU wheel: one function in plain torch.

SGLang's CPU engine imports other names too, which only speculative decoding uses. They raise
NotImplementedError when called.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+plain.torch"


def assign_req_to_token_pool_cpu(
    request_rows: torch.Tensor,
    token_slots: torch.Tensor,  # [requests, positions]: cache slot of each token
    starts: torch.Tensor,
    ends: torch.Tensor,
    new_slots: torch.Tensor,  # the slots of all requests, concatenated
    pool_length: int,
) -> None:
    """Write each request's new slots into its row, from its start to its end."""
    taken = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        token_slots[row, start:end] = new_slots[taken : taken + count].to(token_slots.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no plain torch version")

    return missing
