"""The programs of `.venv-agents`, which `make agents` installs, and how tests run them."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-agents" / "bin"
needs_packages = pytest.mark.skipif(
    not (BIN / "python").exists() and os.environ.get("CI") != "true",
    reason=f"no {BIN}: `make agents` installs it",
)


def run_python(*arguments: object, home: Path) -> str:
    """What a program of the venv prints, in this home directory and none of the user's settings."""
    environment = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for the network
    }
    command = [BIN / "python", *map(str, arguments)]
    ran = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout
