"""Refuse settings that other settings make useless: a run must not seem to use them."""

from collections.abc import Collection, Mapping

from stable_opd_mcore.config.data import DataConfig
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.objective_settings import ObjectiveConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError

_OF_ROLLOUTS = (
    "aggregation",
    "environment.function",
    "kl.beta",
    "mixture.lambda",
    "objective.masks",
    "rollout.importance_correction",
    "rollout.max_staleness",
    "rollout.prefix.by",
    "rollout.routing_replay",
    "sampling.horizon_start",
    "sampling.temperature",
    "sampling.top_p",
)


def refuse_without_effect(config: Config, unused: Mapping[str, str]) -> None:
    """Raise a ConfigError for the first setting that is not at its default and has no effect.

    unused: dotted keys that the objective does not use, and why.
    """
    reasons = dict(unused)
    if config.is_supervised:
        reasons |= dict.fromkeys(_OF_ROLLOUTS, "objective.name=sft has no rollouts")
    for key, (needs, is_met) in _needs(config).items():
        if not is_met:
            reasons.setdefault(key, f"it needs {needs}")
    if config.environment.function is None:
        needs = "it needs environment.function"
        reasons |= {f"environment.{key}": needs for key in EnvironmentConfig.model_fields}
    for number, source in enumerate(config.data.sources):
        own = source.environment
        if own is not None and own.function is None and own != EnvironmentConfig():
            given = ", ".join(own.model_dump(exclude_defaults=True))
            raise ConfigError(
                f"data.train.{number}.environment has {given} and no function, so the rows of "
                f"{source.path} would have one turn: the section replaces the run's whole "
                "environment; repeat its function there, or write {} for one turn"
            )
    defaults = Config.model_construct(data=DataConfig.model_construct())
    for key, reason in sorted(reasons.items()):
        value = _value(config, key)
        if value != _value(defaults, key):
            raise ConfigError(f"{key}={value} would have no effect: {reason}; drop it")


def _needs(config: Config) -> dict[str, tuple[str, bool]]:
    """What a setting needs to have an effect, and whether the run has it."""
    data, rollout = config.data, config.rollout
    is_corrected = rollout.importance_correction != "none"
    has_ratio = (
        "train.minibatches > 1, or rollout.max_staleness > 0 without "
        "rollout.importance_correction: the ratio is 1 otherwise",
        config.train.minibatches > 1 or (rollout.max_staleness > 0 and not is_corrected),
    )
    has_reference = "kl.beta > 0", config.largest_beta > 0
    rows_of = [*data.sources, *filter(None, [data.eval])]
    has_problems = any(each.columns.messages is None for each in rows_of)
    has_schedule = config.optimizer.schedule != "constant"
    has_jsd = any(each.divergence == "jsd" for each in config.objectives)
    is_used = any(config.objective_of(each) == config.objective for each in data.sources)
    in_turn = config.teacher is not None and config.teacher.in_turn
    takes_turns = in_turn and any(map(config.asks_teacher, data.sources))
    return {
        "objective.jsd_beta": ("objective.divergence=jsd", has_jsd),
        "objective.name": ("a source without an objective of its own", is_used),
        "kl.estimator": has_reference,
        "reference.path": has_reference,
        "reference.update": has_reference,
        "fp8.reference": has_reference,
        "normaliser": ("several sources in data.train", len(data.sources) > 1),
        "data.prompt_template": (
            "a source without columns.messages, or evaluation.benchmarks",
            has_problems or bool(config.evaluation.benchmarks),
        ),
        "optimizer.min_lr": ("optimizer.schedule=linear or cosine", has_schedule),
        "reference.every": ("reference.update=every", config.reference.update == "every"),
        "reference.decay": ("reference.update=ema", config.reference.update == "ema"),
        "rollout.importance_threshold": ("rollout.importance_correction", is_corrected),
        "memory.teachers_directory": (
            "several models in teacher.models and an objective that asks a teacher",
            takes_turns,
        ),
        "rollout.sglang.lora": ("student.lora", config.student.lora is not None),
        "objective.clip": has_ratio,
        "objective.advantage.policy": has_ratio,
    }


def refuse_unused_of_source(
    config: Config, settings: ObjectiveConfig, unused: Collection[str], name: str
) -> None:
    """Raise a ConfigError for a setting that a source's objective does not use, unless it has the
    run's value, which other sources use, or the default."""
    own = config.model_copy(update={"objective": settings})
    defaults = Config.model_construct(objective=ObjectiveConfig())
    for key in sorted(unused):
        value = _value(own, key)
        if value not in (_value(config, key), _value(defaults, key)):
            raise ConfigError(
                f"data.train: {key}={value} of a source would have no effect: {name} has no use "
                "for it; drop it"
            )


def _value(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, "lambda_" if part == "lambda" else part)
    return value
