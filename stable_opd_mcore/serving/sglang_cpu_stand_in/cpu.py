"""Let an unmodified SGLang wheel import and serve on a CPU: `prepare()` before the first import
of sglang.

Four things stand in the way: torchvision's wheel is built for CUDA and cannot register its
operators, Triton is absent, older releases wait for a GPU before they hash weights, and the CPU
engine asks for sgl_kernel (the folder beside this file).
Nothing in site-packages changes. Not a fast path: attention is torch's own, which is what a test
or a laptop needs.
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
_library = torch.library.Library("torchvision", "FRAGMENT")  # definitions live as long as this does


def prepare() -> None:
    """Make `import sglang` work in this process. Harmless when called again."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # The three families the trainer knows, instead of importing two hundred model files; any other
    # architecture is still found, at the price of those imports.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "opd_families")
    for operator in _TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, operator.partition("(")[0]):
            _library.define(operator)
    if not torch.cuda.is_available():  # weight checksums before 0.5.23 wait for a GPU, unasked
        torch.cuda.synchronize = lambda device=None: None
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        _stub_triton()


def _stub_triton() -> None:
    """Install SGLang's own stand-in for Triton, which it keeps for Apple machines, under a
    borrowed name.
    """
    stubs = _load_without_package("_platform_stubs.py")
    with (
        patch.object(sys, "platform", "darwin"),
        patch.object(platform, "machine", lambda: "arm64"),
        patch.object(torch.backends.mps, "is_available", lambda: True),
    ):
        stubs.install_platform_stubs()


def _load_without_package(file: str) -> ModuleType:
    """One file of sglang as a module, for importing the package is what needs the stubs."""
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations, "sglang is not installed here"
    path = Path(sglang.submodule_search_locations[0]) / file
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their own module up
    spec.loader.exec_module(module)
    return module
