"""A rollout engine that notes its calls."""

from typing import Any

from stable_opd_mcore.metrics import Metrics, Sum


class Recorder:
    """A rollout engine that notes its calls and forwards them."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.idle, self.interaction = engine.idle, engine.interaction
        self.calls: list[tuple[Any, ...]] = []

    def generate(self, prompts, sampling, *, step):
        self.calls.append(("generate", [p.prompt_id for p in prompts], sampling, step))
        return self._engine.generate(prompts, sampling, step=step)

    def publish(self, weight_version):
        self.calls.append(("publish", weight_version))
        self._engine.publish(weight_version)

    def prefetch(self, prompts, sampling, *, step, weight_version):
        call = ("prefetch", [p.prompt_id for p in prompts], sampling, step, weight_version)
        self.calls.append(call)

    def take_metrics(self):
        return Metrics({"engine/noted": Sum(1)})
