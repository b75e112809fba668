"""Which model `stable-opd evaluate` evaluates, and with which settings.

    config = evaluation_config(target, settings, overrides)    # before anything starts
    model = find_model(config)                                 # called by all ranks

A target is a config, a run's directory, a Hugging Face directory, a Megatron checkpoint or an
adapter that PEFT has saved. What is inside a run's directory has that run's settings, so its model,
adapter and last checkpoint give the same numbers.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.load import load_config, override_key
from stable_opd_mcore.config.schema import Config, RunConfig, StudentConfig, TokenizerConfig
from stable_opd_mcore.data.tokenizer_backend import has_tokenizer
from stable_opd_mcore.errors import ConfigError, UserError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.models.files.peft_directory import base_of, is_adapter
from stable_opd_mcore.train.persistence.checkpoint import newest_checkpoint
from stable_opd_mcore.train.persistence.stored_models import (
    StoredModel,
    model_in,
    run_of,
    run_settings,
    weights_under,
)

PAPER_SETTINGS = Path(__file__).with_name("paper.yaml")
_OF_TRAINING = (  # settings and sections that no evaluation reads, or that the target replaces
    *("aggregation", "checkpoint", "cold_start", "data.train", "evaluation.also_greedy"),
    *("evaluation.every", "guard", "kl", "mixture", "monitoring", "normaliser", "objective"),
    *("optimizer", "reference", "reward", "sampling.horizon_start", "sampling.temperature"),
    *("sampling.top_p", "student.architecture", "student.lora", "student.path", "teacher"),
    *("train.minibatches", "train.recompute", "train.steps"),
)


def evaluation_config(
    target: Path, settings: Path | None = None, overrides: Sequence[str] = ()
) -> Config:
    """The config to evaluate `target` with.

    Args:
        settings: a config for a target that is a model; None: that of its run, else the paper's.
        overrides: see `load_config`. If they name `data.eval` and no benchmarks, only that is
            evaluated.

    Raises:
        UserError: the target does not exist or is none of the five, or an override has no effect
            on its evaluation. With a config, which names a run, settings of the run may stay.
    """
    named = [override_key(override) for override in overrides]
    if "evaluation.benchmarks" not in named and any(n.startswith("data.eval") for n in named):
        overrides = [*overrides, "evaluation.benchmarks=[]"]  # else data.eval would not be read
    if target.is_file():
        if settings is not None:
            raise UserError(f"{target} is a config already; leave out --config {settings}")
        return load_config(target, overrides)
    run = run_of(target)
    changes: dict[str, Any] = {"evaluation": {"model": str(target)}}
    if settings is None and run is not None:
        settings = RunDirectory(run).resolved
        changes["run"] = {"directory": str(run.parent), "name": run.name}
    if settings is None:
        settings = PAPER_SETTINGS
    if run is None:
        _require_model(target)
        whole = {"path": str(target), "window": None, "rope_theta": None}
        changes["student"] = {
            **(base_of(target) if is_adapter(target) else whole),
            "architecture": None,
        }
    for override in overrides:
        if not any(f"{override_key(override)}.".startswith(f"{each}.") for each in _OF_TRAINING):
            continue
        with suppress(ConfigError):  # without it the settings do not go together
            load_config(settings, [each for each in overrides if each != override], changes)
            raise UserError(
                f"override {override!r:.200} has no effect on the evaluation of {target}: it is a "
                "setting of the training; drop it"
            )
    return load_config(settings, overrides, changes)


def named_benchmarks(names: str) -> list[str]:
    """The override for benchmarks with commas between them; "all" is the paper's six."""
    return [f"evaluation.benchmarks=[{','.join(BENCHMARKS) if names == 'all' else names}]"]


def find_model(config: Config) -> StoredModel:
    """`evaluation.model`, or the trained model of the config's run. Collective.

    A run's trained model is the exported one, unless the run has been trained on since and has a
    newer checkpoint.

    Raises:
        UserError: no such model, or a run without a trained one.
    """
    target = Path(config.evaluation.model or config.run.path)
    if config.evaluation.model is not None and not RunDirectory(target).resolved.is_file():
        return model_in(_require_model(target))
    model, newest = RunDirectory(target).model, newest_checkpoint(RunDirectory(target).checkpoints)
    found = [model_in(path) for path in (model, newest) if path is not None and path.is_dir()]
    if not found:
        raise UserError(
            f"{target}: no trained model in it: train first, or name a model to evaluate with "
            "evaluation.model=DIRECTORY"
        )
    return max(found, key=lambda each: -1 if each.step is None else each.step)


def evaluation_configs(
    targets: Sequence[Path], settings: Path | None = None, overrides: Sequence[str] = ()
) -> list[Config]:
    """The `evaluation_config` of each target.

    Raises:
        UserError: as `evaluation_config`, or two models would have one directory of results.
    """
    configs = [evaluation_config(target, settings, overrides) for target in targets]
    owners: dict[Path, str] = {}
    for config in configs:
        model = config.evaluation.model
        if model is None or run_of(Path(model)) is not None:
            continue
        place = config.evaluation_path / model_in(Path(model)).name
        owner = owners.setdefault(place, model)
        if Path(owner).resolve() != Path(model).resolve():
            raise UserError(
                f"{owner} and {model}: the results of both would be in {place}; evaluate one of "
                "them in a command of its own with run.name=NAME, or rename one directory"
            )
    return configs


def evaluated_config(config: Config, model: StoredModel) -> Config:
    """The config with the model as its student and the results' directory as its run. Where the
    model is low-rank factors, the student is their base: in a run that of the run.

    Where the config sets no tokenizer, stop ids or arguments of the chat template, those of the run
    that trained the model count, so a run's model and its checkpoints have the same. A model of no
    run has its own tokenizer.
    """
    run = run_of(model.path)
    trained = run_settings(model.path)
    tokenizer, stop_ids = config.tokenizer.path, config.student.stop_token_ids
    template_kwargs = config.student.chat_template_kwargs
    source = weights_under(model)
    if run is not None:
        tokenizer = tokenizer or trained["tokenizer"]["path"] or trained["student"]["path"]
        stop_ids = stop_ids or trained["student"]["stop_token_ids"]
        template_kwargs = template_kwargs or trained["student"]["chat_template_kwargs"]
    elif tokenizer is None:
        holders = (path for path in (str(model.path), source["path"]) if has_tokenizer(path))
        tokenizer = next(holders, config.student.path)
    stop_ids = None if stop_ids is None else tuple(stop_ids)
    student = StudentConfig(**source, stop_token_ids=stop_ids, chat_template_kwargs=template_kwargs)
    is_own_run = run is not None and config.run.path.resolve() == run.resolve()
    if is_own_run or config.student.path == student.path:  # else they are another model's
        own = {"window": config.student.window, "rope_theta": config.student.rope_theta}
        own = {key: value for key, value in own.items() if value is not None}
        student = student.model_copy(update=own)
    return config.model_copy(
        update={
            "run": RunConfig(name=model.name, directory=str(config.evaluation_path)),
            "student": student,
            "tokenizer": TokenizerConfig(path=tokenizer),
        }
    )


def _require_model(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; set evaluation.model to a model or a run")
    if not (path / "config.json").is_file() and not is_adapter(path):
        raise UserError(
            f"{path}: neither a run (it has no {RunDirectory(path).resolved.name}) nor a model "
            "or checkpoint (no config.json) nor an adapter (no adapter_config.json); give one of "
            "them"
        )
    return path
