"""A kernel is built by the CUDA toolkit that is installed here; tests/commands/check/test_node.py
has the faults that stand-ins show."""

import os
import shutil
from pathlib import Path

import pytest

from stable_opd_mcore.host.kernel_compilers import compiler_faults, missing_tools

TOOLKIT = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


@pytest.mark.skipif(
    not (TOOLKIT / "lib64/libcudart.so").exists() or not shutil.which("c++"),
    reason="needs a CUDA toolkit and a C++ compiler",
)
def test_a_kernel_is_built_as_sglang_does(tmp_path):
    ninja = tmp_path / "bin/ninja"
    ninja.parent.mkdir()
    ninja.touch(0o755)
    python, variables = str(ninja.with_name("python")), {"PATH": "/usr/bin:/bin"}
    variables["CUDA_HOME"] = str(TOOLKIT)
    assert missing_tools(python, variables) == ""
    (tmp_path / "curand.h").touch()
    with_header = variables | {"CPATH": f"{tmp_path}/bin:{tmp_path}"}
    assert missing_tools(python, with_header, with_draft=True) == ""
    assert compiler_faults(python, "", variables) == {}
    absent = str(tmp_path / "absent")
    (line,) = compiler_faults(python, "", variables | {"TMPDIR": absent}).values()
    assert "nvcc fatal" in line
    assert absent in line
