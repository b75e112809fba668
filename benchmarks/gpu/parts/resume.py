"""A run is killed with SIGKILL after a checkpoint, resumes, and trains to its end.

Another run then replays its rollouts without a break. Both must have the same metrics. The rollouts
are replayed because GPU kernels that add in any order may change a sampled token; the limit leaves
room for the same rounding in the metrics.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.inputs import config_of, qwen2, write_inputs
from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.monitoring.metric_sinks import read_metrics

VOCAB = 515
STEPS, EVERY, KILLED_AFTER = 6, 2, 3
COMPARED = ("loss/total", "loss/pg", "loss/kl", "loss/sft", "grad_norm", "entropy/student")
LIMIT = 1e-3


def run(record: Record, options: Options) -> None:
    folder = options.scratch
    write_inputs(folder, VOCAB, prompts=16, solution_words=16)
    killed = resumable_config(folder, "killed")
    seconds = train_until_killed(killed)
    record.figure("start, and steps until the kill", seconds, "s")
    record.figure("resumed run", train(killed), "s")
    replay = {"engine": "replay", "replay_from": str(killed.run.path)}
    unbroken = resumable_config(folder, "unbroken", rollout=replay)
    train(unbroken)
    compare(record, killed.run.path, unbroken.run.path)


def resumable_config(folder: Path, name: str, rollout: dict[str, str] | None = None) -> Config:
    return config_of(
        folder,
        name,
        student={"architecture": qwen2(64, 2, 4, 2, 192, VOCAB)},
        teacher={"architecture": qwen2(64, 2, 4, 2, 192, VOCAB)},
        sampling={"max_new_tokens": 16},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "save": "all"} | (rollout or {}),
        optimizer={"lr": 1e-3},
        train={"steps": STEPS, "micro_batch_tokens": 1024},
        checkpoint={"every": EVERY},
    )


def start(config: Config) -> subprocess.Popen[bytes]:
    file = config.run.path.with_suffix(".yaml")
    save_config(config, file)
    return subprocess.Popen([sys.executable, "-m", "stable_opd_mcore", "train", str(file)])


def train(config: Config) -> float:
    """Train to the end; the seconds that took."""
    began = time.monotonic()
    process = start(config)
    code = process.wait()
    if code:
        raise RuntimeError(f"the run {config.run.name} ended with exit code {code}")
    return time.monotonic() - began


def train_until_killed(config: Config) -> float:
    """Kill the run once it has finished KILLED_AFTER steps; the seconds until then."""
    metrics = config.run.path / "metrics.jsonl"
    began = time.monotonic()
    process = start(config)
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= KILLED_AFTER:
            process.kill()
            process.wait()
            return time.monotonic() - began
        time.sleep(0.005)
    raise RuntimeError(f"no {KILLED_AFTER} steps to kill it after; exit code {process.returncode}")


def compare(record: Record, killed: Path, unbroken: Path) -> None:
    rows, expected = (read_metrics(path / "metrics.jsonl") for path in (killed, unbroken))
    steps = [row["step"] for row in rows]
    record.check("steps missing or repeated", float(steps != list(range(1, STEPS + 1))), 0)
    pairs = [
        (row[key], want[key]) for row, want in zip(rows, expected, strict=True) for key in COMPARED
    ]
    differences = [abs(found - want) / max(abs(want), 1e-3) for found, want in pairs]
    record.check("metrics: largest relative difference", max(differences), LIMIT)
    equal = sum(found == want for found, want in pairs)
    record.figure("metrics that are equal bit for bit", f"{equal} of {len(pairs)}")
