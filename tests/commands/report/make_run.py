"""A small run on disk, as training leaves it: metrics, settings, rollouts. Values are made up."""

import math
from pathlib import Path

from stable_opd_mcore.commands.report.figures import FIGURES
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.rollout_files import write_rollouts
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import JsonlSink
from stable_opd_mcore.records import Prompt, Rollout

HOSTILE = "</script></pre><script>fail()</script><img src=x onerror=fail()> {{ 7 * 7 }} \x00\u202e"


def config(name: str = "a-run", **sections) -> Config:
    values = {
        "run": {"name": name},
        "student": {"path": "somewhere"},
        "data": {"train": {"path": "synthetic:arithmetic"}},
    }
    return Config.model_validate(values | sections)


def make_run(
    directory: Path,
    steps: int = 30,
    collapse_at: int | None = None,
    text: str = "1+1=2;[2]",
    **kl,
) -> Path:
    """Write `steps` rows of every metric the figures show, an evaluation every ten steps."""
    keys = [key for figure in FIGURES for key in figure.panels]
    sink = JsonlSink(directory / "metrics.jsonl")
    for step in range(steps + 1):
        broken = collapse_at is not None and step > collapse_at
        row = {key: 0.5 + 0.3 * math.sin(step) for key in keys if not key.startswith("eval/")}
        if step % 10 == 0:
            row |= {key: 0.1 if broken else 0.6 for key in keys if key.startswith("eval/")}
        sink.write(step, row | {"rollout/repetition_rate": float(broken), "kl/reference": None})
    sink.close()
    for step in (1, steps):
        loop = "w1;" * 100 if collapse_at is not None and step > collapse_at else ""
        prompt = Prompt("train:0", "1+1", (1, 2), "2")
        rollouts = [
            Rollout(prompt, 0, (3, 4), (-0.1, -0.2), "stop", step, text, 1.0),
            Rollout(prompt, 1, (3,), (-0.1,), "length", step, text + loop, 0.0),
        ]
        write_rollouts(RunDirectory(directory).rollouts(step), rollouts)
    save_config(config(directory.name, kl=kl), directory / "config.resolved.yaml")
    return directory
