"""What the tests with real SGLang servers share: where the servers' venv is, tiny models, a
training run.

Not fixtures of a fake server: without the venv (`make sglang`) these tests are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("STABLE_OPD_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
needs_sglang = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK), reason=f"no SGLang at {PYTHON}: `make sglang` installs it"
)
VOCABULARY = 128
SERVER_ARGUMENTS = ("--max-total-tokens", "8192")


def architecture(model_type: str = "qwen2", *, tied: bool = True, **changes: Any) -> dict[str, Any]:
    """config.json's fields of a model of two small layers."""
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "initializer_range": 0.08,
    } | changes


def train(directory: Path, name: str, *overrides: str, check: bool = True) -> Path:
    """`stable-opd train configs/smoke_cpu.yaml` with SGLang rollouts, in a process of its own."""
    process = subprocess.run(
        training_command(directory, name, *overrides),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert not check or process.returncode == 0, process.stderr[-3000:]
    return directory / name


def training_command(directory: Path, name: str, *overrides: str) -> list[str]:
    arguments = ",".join(f"'{argument}'" for argument in SERVER_ARGUMENTS)
    return [
        *(sys.executable, "-m", "stable_opd_mcore", "train", "configs/smoke_cpu.yaml"),
        f"run.name={name}",
        f"run.directory={directory}",
        "rollout.engine=sglang",
        f"rollout.sglang.python={PYTHON}",
        f"rollout.sglang.arguments=[{arguments}]",
        "monitoring.tensorboard=false",
        "evaluation.every=0",
        *overrides,
    ]


def rows(run: Path) -> list[dict[str, Any]]:
    """The run's metrics, one object per step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss/total" in row]


def events(run: Path) -> list[dict[str, Any]]:
    """What the engine logged of its servers."""
    return [json.loads(line) for line in (run / "sglang/events.jsonl").read_text().splitlines()]
