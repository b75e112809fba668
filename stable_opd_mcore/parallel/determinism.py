"""Make the same inputs give the same bits on a GPU, in every run of the same layout.

Without it, kernels that add with atomics, and libraries that choose algorithms by timing or by free
workspace, give results that differ in the last bits, so a resumed run departs from the one that was
not interrupted.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # a workspace for each stream; read at its first product
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine: attention's backward
    "NCCL_ALGO": "Ring",  # one order of summation for every message size
}


def make_deterministic() -> None:
    """Choose deterministic algorithms in this process, before its first process group.

    An operation that has none raises a RuntimeError that names it.
    """
    os.environ.update(_VARIABLES)
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN would only help to find reads of undefined memory.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
