"""Every program of benchmarks/ that a document names runs at its `--smoke` size.

They run as `python -m` runs them, but in this process, because importing torch costs more than they
do. `sync` starts a real SGLang server; `make test-sglang` runs it. Not here: the figures, and `gpu`
(tests/integration/test_gpu_suite.py).
"""

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.config.load import load_config

ROOT = Path(__file__).parents[2]
NEEDS_ALFWORLD = pytest.mark.skipif(not find_spec("alfworld"), reason="alfworld is not installed")
PROGRAMS = {
    "agents": (),
    "alfworld.games": NEEDS_ALFWORLD,
    "control_plane": (),
    "fp8": (),
    "loss": (),
    "plan_memory": (),
    "prefixes": (),
    "real_lm.pair": (),
    "score": (),
    "step": (),  # without TRL, which has an environment of its own
    "sync": pytest.mark.cluster,
}
ARGUMENTS = {"alfworld.games": ["{}"], "real_lm.pair": ["{}"]}
PRINTS = {
    "agents": r"8 turns of 32 tokens in .*\nmain thread, time lost while 4 agents run: \d",
    "alfworld.games": r"tokens in ",
    "control_plane": r"\| 4 x 64 over 2 \|.*\| 0 \|\n(.|\n)*top 0 and two stop ids: \d",
    "fp8": r"\| qwen2, random \| all three \| blockwise \| 0\.\d",
    "loss": r"(?s)│ ours +│ +\d.*│ ours, opd +│ +\d.*│ plain torch +│ +\d.*│ gemms +│ +\d",
    "plan_memory": r"\| 128, 2 \| TP1 x PP1 x CP1 x DP1 \| \d+ \| -?\d+ \|",
    "prefixes": r"4 : 1, groups of 16 \| 0\.[34]\d",
    "real_lm.pair": r"^$",
    "score": r"4 rows: \d+ s",
    "step": r"smoke │ ours +│ +\d",
    "sync": r"(?s)distributed +\d.*tensor +\d.*disk +\d",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in PROGRAMS.items()])
def test_a_benchmark_runs(name, tmp_path, monkeypatch, capfd):
    arguments = [each.format(tmp_path) for each in ARGUMENTS.get(name, [])]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--smoke", *arguments])
    threads, code = torch.get_num_threads(), None
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    finally:
        torch.set_num_threads(threads)
    assert not code
    assert re.search(PRINTS[name], capfd.readouterr().out)


def test_every_benchmark_and_config_that_a_document_names_is_here():
    pages = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    text = "\n".join((ROOT / page).read_text() for page in pages if page != "CHANGELOG.md")
    assert set(re.findall(r"-m benchmarks\.(\w+(?:\.\w+)?)", text)) <= {*PROGRAMS, "gpu"}
    for path in set(re.findall(r"benchmarks/\w+/\w+\.yaml", text)):
        load_config(ROOT / path)
