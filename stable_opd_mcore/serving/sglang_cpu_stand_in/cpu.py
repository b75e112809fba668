"""Make an unmodified SGLang wheel import and serve on a CPU: call `prepare()` before importing it.

Four things prevent it otherwise: torchvision's wheel is built for CUDA and cannot register its
operators, Triton is absent, 0.5.13 synchronises a GPU before it hashes weights, and the CPU engine
imports sgl_kernel (the folder beside this file). Nothing in site-packages changes. Not fast:
attention is torch's own, which is enough for tests and laptops.
"""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

_TORCHVISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = torch.library.Library("torchvision", "FRAGMENT")  # keeps the definitions registered


def prepare() -> None:
    """Make `import sglang` work in this process. May be called more than once."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # Registers the trainer's three families first, so SGLang does not import two hundred model
    # files for them. Other architectures still work, but load slowly.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "opd_families")
    for operator in _TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, operator.partition("(")[0]):
            _library.define(operator)
    if not torch.cuda.is_available():  # SGLang 0.5.13 calls it before it hashes weights
        torch.cuda.synchronize = lambda device=None: None
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        _stub_triton()


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
