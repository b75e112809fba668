"""The Triton kernels against the torch passes: interpreted on a CPU, compiled for and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6'")


def run_check(program: str = "check_kernels", **environment: str) -> str:
    """Run a kernel check as a program: triton reads its mode when it is first imported."""
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.losses.{program}"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_kernels_interpreted_equal_the_torch_passes():
    assert "6 cases on cpu" in run_check(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_kernels_compile_for_an_h200_with_wide_loads(tmp_path):
    assert "3 kernels for sm_90" in run_check("compile_kernels", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_kernels_compiled_equal_the_torch_passes():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert "6 cases on cuda" in run_check()
