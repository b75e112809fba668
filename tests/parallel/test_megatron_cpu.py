"""The rewriting of Megatron's modules on import."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.parallel import megatron_cpu

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is for the CPU")


def _run(source: str, tmp_path: Path) -> dict:
    """Execute `source` as if it were a module of Megatron."""
    assert megatron_cpu.is_needed()
    file = tmp_path / "module.py"
    file.write_text(source)
    loader = megatron_cpu._Loader("module", str(file))
    spec = spec_from_file_location("module", file, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return vars(module)


@needs_no_cuda
def test_code_that_needs_cuda_is_rewritten(tmp_path: Path) -> None:
    found = _run(
        """
import torch
from torch.cuda.nvtx import range_push
device = torch.cuda.current_device()
placed = torch.zeros(2, device="cuda", pin_memory=True).cuda(non_blocking=True)
names = ["cuda:0"[:0] + "cuda:", "torch.cuda.FloatTensor"]
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.synchronize()
torch.cuda.manual_seed(5)
sampled = torch.rand(3)
range_push("x")
""",
        tmp_path,
    )
    assert found["device"] == torch.device("cpu") == found["placed"].device
    assert found["names"] == ["", "torch.FloatTensor"]
    assert torch.equal(found["sampled"], torch.rand(3, generator=torch.Generator().manual_seed(5)))


CUDA_PACKAGE = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def function(*arguments, **options):
        raise RuntimeError("CUDA error: no kernel image is available")
    return function
"""
IMPORT = """
import sys
import stable_opd_mcore
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
assert not {"transformer_engine", "transformer_engine_torch", "apex", "amp_C"} & set(sys.modules)
assert not gpt_layer_specs.HAVE_TE
"""


@needs_no_cuda
def test_megatron_takes_no_cuda_package_that_is_installed(tmp_path: Path) -> None:
    """As on a cluster's login node: the packages can be imported, and fail when called."""
    packages = tmp_path / "packages"
    for name in ("transformer_engine", "transformer_engine/pytorch", "apex"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(CUDA_PACKAGE)
    for name in (
        "transformer_engine/pytorch/optimizers",
        "transformer_engine_torch",
        "apex/optimizers",
        "amp_C",
    ):
        (packages / f"{name}.py").write_text(CUDA_PACKAGE)
    run = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env=os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{os.getcwd()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@needs_no_cuda
def test_changed_source_is_compiled_again(tmp_path: Path) -> None:
    """The cached bytecode of the earlier source is not used."""
    assert _run("value = 1", tmp_path)["value"] == 1
    assert _run("value = 22", tmp_path)["value"] == 22
