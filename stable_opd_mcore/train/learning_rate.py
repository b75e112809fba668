"""The learning-rate schedule, a pure function of the step: a resumed run needs no state of it."""

import math

from stable_opd_mcore.config.schema import OptimizerConfig


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of the update number `step` (0-based) out of `num_steps`.

    Linear warm-up from lr/warmup_steps to lr, then constant, or linear or cosine decay that reaches
    min_lr at the last step.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(1, num_steps - config.warmup_steps - 1)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    share = (
        1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    )
    return config.min_lr + (config.lr - config.min_lr) * share
