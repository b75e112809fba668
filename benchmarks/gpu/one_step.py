"""One training step of each of some configs in this process, and all that it computed.

    python -m benchmarks.gpu.one_step LAYERS RESULT CONFIG...

LAYERS is "torch" or "installed": with "torch" Transformer Engine counts as not installed. RESULT is
a folder; each config's `<run name>.pt` there holds logits of the first rows before the step, the
gradients, the update, and the metrics. The rollouts are stored in the run directory, as a run with
rollout.save=all stores them. Called by the parts "step" and "layers".
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOGIT_ROWS = 128


@dataclass(frozen=True)
class StepRecord:
    """What one step computed, on the CPU, in fp32, tensors by their Hugging Face names."""

    logits_NV: Tensor  # the first LOGIT_ROWS scored rows, before the step
    gradients: dict[str, Tensor]
    update: dict[str, Tensor]  # weights after the step minus weights before it
    metrics: dict[str, float]


def take_steps(
    layers: str, folder: Path, configs: Sequence[Any], environment: dict[str, str]
) -> list[StepRecord]:
    """Run the configs in a fresh process, in order.

    Raises:
        RuntimeError: the process failed; the message ends with its last line.
    """
    from stable_opd_mcore.config.load import save_config

    files = []
    for config in configs:
        files.append(folder / f"{config.run.name}.yaml")
        save_config(config, files[-1])
    command = [sys.executable, "-m", "benchmarks.gpu.one_step", layers, str(folder)]
    finished = subprocess.run(
        [*command, *map(str, files)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(finished.stdout)
    if finished.returncode:
        lines = finished.stdout.strip().splitlines() or ["no output"]
        raise RuntimeError(f"{layers} layers, exit code {finished.returncode}: {lines[-1]}")
    return [StepRecord(**torch.load(file.with_suffix(".pt"))) for file in files]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| over |expected|, both L2 norms."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """The error of all tensors as one vector, and that of the tensor with the largest error."""
    assert found.keys() == expected.keys()
    whole = [torch.cat([x[name].flatten() for name in expected]) for x in (found, expected)]
    worst = max(relative_error(found[name], expected[name]) for name in expected)
    return relative_error(whole[0], whole[1]), worst


def take_step(file: Path) -> StepRecord:
    """Run the first step of a config and write its rollouts."""
    from stable_opd_mcore.config.load import load_config
    from stable_opd_mcore.data.rollout_files import write_rollouts
    from stable_opd_mcore.inputs.run_inputs import RunInputs
    from stable_opd_mcore.models.weights import iter_hf_tensors
    from stable_opd_mcore.parallel.world import start_world
    from stable_opd_mcore.train import student
    from stable_opd_mcore.train.persistence.state import TrainState
    from stable_opd_mcore.train.setup import build_run
    from stable_opd_mcore.train.step import train_step

    config = load_config(file)
    student.ADAM_EPS = 1.0  # large: the update is then a smooth function of the gradient
    run = build_run(RunInputs(config), start_world(config.parallel, config.train.seed))
    chunks = run.student.chunks

    def tensors() -> dict[str, Tensor]:
        return {name: t.detach().float().cpu().clone() for name, t in iter_hf_tensors(chunks)}

    before, logits_NV = tensors(), first_logits(run)
    result = train_step(run, TrainState())
    write_rollouts(config.run.files.rollouts(1), result.rollouts)
    after = tensors()
    for chunk in chunks:  # gradients take the names and layout of their weights
        for weight in chunk.parameters():
            weight.data = weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]
    run.grader.close()
    values = result.metrics.values_by_key()
    return StepRecord(
        logits_NV=logits_NV,
        gradients=tensors(),
        update={name: after[name] - before[name] for name in after},
        metrics={key: value for key, value in values.items() if value is not None},
    )


@torch.no_grad()
def first_logits(run: Any) -> Tensor:
    """The student's logits of the first rows of the first micro-batch that the step will train."""
    from stable_opd_mcore.models.hidden_states import forward_hidden
    from stable_opd_mcore.monitoring.throughput import PhaseTimer
    from stable_opd_mcore.train.persistence.state import TrainState
    from stable_opd_mcore.train.samples.collecting import collect_samples
    from stable_opd_mcore.train.step import facts_of_step, minibatches_of, pack_minibatch

    _, samples = collect_samples(run, TrainState(), PhaseTimer())
    facts = facts_of_step(run, samples)
    batch = pack_minibatch(run, minibatches_of(run, samples, facts)[0])[0]
    hidden_TH = forward_hidden(run.student.chunks[0], batch)
    return run.head.logits(hidden_TH[batch.rows_N[:LOGIT_ROWS]]).float().cpu()


def main() -> None:
    layers, folder, *files = sys.argv[1:]
    if layers == "torch":
        sys.modules["transformer_engine"] = None  # pyright: ignore[reportArgumentType]
    from stable_opd_mcore.parallel.world import stop_world

    for file in map(Path, files):
        torch.save(vars(take_step(file)), Path(folder) / f"{file.stem}.pt")
    stop_world()


if __name__ == "__main__":
    main()
