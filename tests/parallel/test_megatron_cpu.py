"""The import hook's rewriting, and the Adam that stands in for the fused one."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.parallel import megatron_cpu
from stable_opd_mcore.parallel.cpu_adam import FusedAdam

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is for the CPU")


def _run(source: str, tmp_path: Path) -> dict:
    """Execute `source` as if it were a module of Megatron."""
    megatron_cpu.install()
    file = tmp_path / "module.py"
    file.write_text(source)
    loader = megatron_cpu._Loader("module", str(file))
    spec = spec_from_file_location("module", file, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return vars(module)


@needs_no_cuda
def test_spellings_that_need_cuda_are_rewritten(tmp_path: Path) -> None:
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
drawn = torch.rand(3)
range_push("x")
""",
        tmp_path,
    )
    assert found["device"] == torch.device("cpu") == found["placed"].device
    assert found["names"] == ["", "torch.FloatTensor"]
    assert torch.equal(found["drawn"], torch.rand(3, generator=torch.Generator().manual_seed(5)))


@needs_no_cuda
def test_torch_itself_is_untouched(tmp_path: Path) -> None:
    before = torch.cuda.current_device
    _run("import torch\nfacade = torch.cuda", tmp_path)
    assert torch.cuda.current_device is before
    assert type(torch.cuda).__name__ == "module"


@needs_no_cuda
def test_changed_source_is_compiled_again(tmp_path: Path) -> None:
    """Cached bytecode never outlives its file."""
    assert _run("value = 1", tmp_path)["value"] == 1
    assert _run("value = 22", tmp_path)["value"] == 22


@needs_no_cuda
def test_too_late_is_said() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('x')\n"
        "import stable_opd_mcore"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "before the first import of megatron.core" in run.stderr


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(weight_decay: float, decoupled: bool) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    optimizers = [FusedAdam(ours, adam_w_mode=decoupled, **settings), kind(theirs, **settings)]
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_adam_keeps_the_fused_state_layout() -> None:
    """Megatron's distributed checkpoints rely on it: `step` in the group, two moments per
    parameter."""
    weight = torch.nn.Parameter(torch.ones(2))
    idle = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([weight, idle])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[weight]) == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(idle, torch.ones(2))
