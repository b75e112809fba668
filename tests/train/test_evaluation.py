"""`stable-opd evaluate` on the paper's benchmarks: real problems, real tokenizer, a tiny model."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS
from tests.real_data import real_data

REPOSITORY = Path(__file__).parents[2]
ROWS = 2


@pytest.fixture
def benchmarks(tmp_path):
    """A directory with the first rows of every benchmark, one file each."""
    for name in BENCHMARKS:
        with real_data(f"eval/{name}.jsonl").open() as lines:
            (tmp_path / f"{name}.jsonl").write_text("".join(islice(lines, ROWS)))
    return tmp_path


def test_all_benchmarks_with_their_own_num_samples_in_one_table(benchmarks):
    command = [
        *("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
        *("-m", "stable_opd_mcore", "evaluate", "configs/gsm8k_cpu.yaml"),
        f"tokenizer.path={real_data('tokenizers/Qwen2.5-Math-1.5B')}",
        f"evaluation.benchmarks=[{','.join(BENCHMARKS)}]",
        f"evaluation.benchmark_directory={benchmarks}",
        f"run.directory={benchmarks}",
        "sampling.max_new_tokens=4",
    ]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    table = [line.split() for line in result.stdout.splitlines() if line]
    assert [row[0] for row in table] == ["problems", *BENCHMARKS, "average"]
    values = json.loads((benchmarks / "gsm8k_cpu" / "evaluation.json").read_text())
    assert list(values) == list(BENCHMARKS)
    for name, benchmark in BENCHMARKS.items():
        assert values[name]["num_prompts"] == ROWS
        assert values[name]["num_samples"] == benchmark.num_samples
        responses = benchmarks / "gsm8k_cpu" / "evaluation" / f"{name}.jsonl"
        rows = [json.loads(line) for line in responses.read_text().splitlines()]
        assert len(rows) == ROWS * benchmark.num_samples
        assert all(row["prompt_id"].startswith(f"{name}.jsonl:") for row in rows)
