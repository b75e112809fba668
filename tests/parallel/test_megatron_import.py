"""The import hook: installed before Megatron, and without loading torch."""

import subprocess
import sys

import pytest
import torch


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_settings_and_data_load_without_torch() -> None:
    modules = "config.load, config.schema, data.chat, data.sources, data.synthetic, errors, metrics"
    imports = ", ".join(f"stable_opd_mcore.{name.strip()}" for name in modules.split(","))
    run = run_python(
        f"import sys, {imports}; assert not {{'torch', 'megatron'}} & set(sys.modules)"
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is for the CPU")
def test_the_package_must_come_before_megatron() -> None:
    run = run_python(
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('x')\n"
        "import stable_opd_mcore"
    )
    assert run.returncode != 0
    assert "before the first import of megatron.core" in run.stderr
