"""The stand-in for `torch.cuda` inside megatron-core on a machine without CUDA.

There is one device, the CPU; streams and events do nothing; the CUDA generator is torch's default
generator. Any other name is looked up in the real torch.cuda.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_context(*args: Any, **kwargs: Any) -> nullcontext:
    return nullcontext()


class Stream:
    """Replaces torch.cuda.Stream and torch.cuda.Event: calls return when their work is done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Stream | None = None) -> Stream:
        return event or Stream()

    record = wait = wait_stream = wait_event = synchronize = _nothing

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None


_STREAM = Stream()


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(state)


class _Facade(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


FACADE = _Facade("_cpu_cuda")
vars(FACADE).update(
    current_device=lambda: torch.device("cpu"),
    is_available=lambda: False,
    device_count=lambda: 1,
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    Stream=Stream,
    Event=Stream,
    stream=_no_context,
    set_stream=_nothing,
    current_stream=lambda device=None: _STREAM,
    default_stream=lambda device=None: _STREAM,
    memory_stats=lambda device=None: defaultdict(int),
    memory_allocated=lambda device=None: 0,
    max_memory_allocated=lambda device=None: 0,
    memory_reserved=lambda device=None: 0,
    manual_seed=_set_seed,
    manual_seed_all=_set_seed,
    get_rng_state=_get_rng_state,
    set_rng_state=_set_rng_state,
    random=SimpleNamespace(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state),
    FloatTensor=torch.FloatTensor,
    HalfTensor=torch.HalfTensor,
    BFloat16Tensor=torch.BFloat16Tensor,
    nvtx=SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context),
    triton_stub=MagicMock(name="triton"),
)


def nvtx_module(name: str) -> ModuleType:
    """A module whose annotations do nothing, for `from torch.cuda.nvtx import ...`."""
    module = ModuleType(name)
    vars(module).update(vars(FACADE.nvtx))
    return module
