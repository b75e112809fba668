"""The two configs of a cold start: the supervised run's and that of the run that starts from it."""

from stable_opd_mcore.config.schema import Config


def cold_start_config(config: Config) -> Config:
    """The config of the supervised run before distillation, in `<run>/cold_start`."""
    assert config.cold_start is not None
    cold = config.cold_start
    values = config.model_dump(by_alias=True)
    home = config.run.files
    values["run"] = {"name": home.cold_start.name, "directory": str(home.path)}
    values["objective"] = {"name": "sft"}
    if isinstance(config.data.train, tuple):
        for source in values["data"]["train"]:
            source["objective"] = None
    values["rollout"] = {"prompts_per_step": cold.prompts_per_step}  # it samples none
    # Without rollouts these have no use.
    for section in ("aggregation", "environment", "kl", "mixture", "reference", "guard"):
        del values[section]
    values["sampling"] = {"max_new_tokens": config.sampling.max_new_tokens}
    min_lr = min(config.optimizer.min_lr, cold.lr)
    values["optimizer"] |= {"lr": cold.lr, "min_lr": min_lr, "warmup_steps": cold.warmup_steps}
    values["train"] |= {"steps": cold.steps, "minibatches": 1}
    # It has neither servers nor frozen models.
    values["memory"] = {}
    values["fp8"] = {"student": config.fp8.student}
    values |= {"teacher": None, "cold_start": None}
    return Config.model_validate(values)


def after_cold_start(config: Config) -> Config:
    """The config that starts from the model of the cold start."""
    model = cold_start_config(config).run.files.model
    values = config.model_dump(by_alias=True)
    values["tokenizer"]["path"] = config.tokenizer.path or config.student.path
    values["student"] |= {"path": str(model), "architecture": None}
    values["cold_start"] = None
    if values["student"]["lora"] is not None:  # merged into that model
        values["student"]["lora"]["path"] = None
    return Config.model_validate(values)
