"""Make an unmodified SGLang wheel import and serve on a CPU: call `prepare()` before importing it.

Five things prevent it otherwise: torchvision's wheel is built for CUDA and cannot register its
operators, Triton is absent, the buffer of chosen experts is pinned by CUDA, low-rank adapters pin
all that they hold on the host, and the CPU engine imports sgl_kernel, which has no CPU wheel
(sgl_kernel/ is used instead). SGLang's own files stay as they are. Not fast: attention is torch's
own, which is enough for tests and laptops. A server's workers are forked, so SGLang is imported
once and not three times, and nothing is compiled, so torch's compiler is not imported.
"""

import importlib.util
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from sglang_cpu import sgl_kernel

_TORCHVISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = torch.library.Library("torchvision", "FRAGMENT")  # keeps the definitions registered


class _UnpinnedMemory:
    """Stands for the CUDA runtime that pins a host buffer: a CPU reads the buffer as it is."""

    cudaHostRegister = staticmethod(lambda *unused: 0)  # CUDA's name
    cudaHostUnregister = staticmethod(lambda *unused: 0)


def prepare() -> None:
    """Make `import sglang` work in this process. May be called more than once."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile returns the function as it is
    # Registers the trainer's families first, so SGLang does not import two hundred model
    # files for them. Other architectures still work, but load slowly.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", __name__)  # it has families.py
    sys.modules["sgl_kernel"] = sgl_kernel
    for operator in _TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, operator.partition("(")[0]):
            _library.define(operator)
    if not torch.cuda.is_available():
        torch.cuda.cudart = _UnpinnedMemory  # the buffer of chosen experts asks for it
        torch.Tensor.pin_memory = lambda tensor, *unused: tensor
        for name in ("empty", "tensor", "zeros"):
            setattr(torch, name, _without_pinning(getattr(torch, name)))
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        _stub_triton()
    _fork_workers()


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of torch that ignores `pin_memory`, which raises an error without a GPU."""

    @wraps(make)
    def unpinned(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return make(*arguments, **named)

    return unpinned


def _fork_workers() -> None:
    """SGLang asks for spawned workers because of CUDA. On a CPU each would import SGLang again:
    ten seconds of one core.
    """
    set_method = multiprocessing.set_start_method

    def set_fork(method: str | None, force: bool = False) -> None:
        set_method("fork", force=force)

    multiprocessing.set_start_method = set_fork
    torch.multiprocessing.set_start_method = set_fork


def _stub_triton() -> None:
    """Install SGLang's own replacement for Triton, which it otherwise uses on macOS only."""
    stubs = _load_without_package("_platform_stubs.py")
    with (
        patch.object(sys, "platform", "darwin"),
        patch.object(platform, "machine", lambda: "arm64"),
        patch.object(torch.backends.mps, "is_available", lambda: True),
    ):
        stubs.install_platform_stubs()


def _load_without_package(file: str) -> ModuleType:
    """One file of sglang as a module; importing the whole package would already need the stubs."""
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations, "sglang is not installed here"
    path = Path(sglang.submodule_search_locations[0]) / file
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
