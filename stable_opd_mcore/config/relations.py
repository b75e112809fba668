"""What settings of different sections do not go together. Loads without torch.

Each rule says why a run cannot have its settings, and what to set; None: it can. They are tried in
the order of RULES. Rules about student.lora, sources and prefixes have files of their own; one
about a single section is in that section, and no_effect.py refuses settings that nothing reads.
"""

from typing import Any

from stable_opd_mcore.config.lora_rules import lora_refusal
from stable_opd_mcore.config.prefix_settings import prefix_refusal
from stable_opd_mcore.config.several_teachers import teachers_refusal
from stable_opd_mcore.config.source_objectives import objectives_refusal
from stable_opd_mcore.config.training import LARGEST_WATCHDOG_MINUTES, LONGEST_WAIT_MINUTES


def relations_refusal(config: Any) -> str | None:
    """The first reason; None: all settings go together.

    Args:
        config: schema.Config, which calls this; so do the rules.
    """
    return next((reason for rule in RULES if (reason := rule(config)) is not None), None)


def _paths_refusal(config: Any) -> str | None:
    if config.student.path is None and config.student.architecture is None:
        return (
            "neither student.path nor student.architecture is set; set path to a Hugging Face "
            "directory, or architecture for random weights"
        )
    if config.tokenizer.path is None and config.student.path is None:
        return "neither tokenizer.path nor student.path names a tokenizer; set tokenizer.path"
    return None


def _teacher_refusal(config: Any) -> str | None:
    teacher = config.teacher
    served = teacher is not None and teacher.is_served
    if served and config.sampling.temperature != 1:
        return (
            f"sampling.temperature={config.sampling.temperature} with teacher.engine=sglang: a "
            "server scores prompts only at temperature 1, so its log-probabilities would not "
            "compare with the student's; set sampling.temperature=1 or teacher.engine=megatron"
        )
    if served and config.fp8.teacher:
        return (
            f"fp8.teacher={config.fp8.teacher} with teacher.engine=sglang: the servers choose a "
            "served teacher's precision; set fp8.teacher=null or teacher.engine=megatron"
        )
    if teacher is not None and teacher.prompt_function is not None:
        fraction = config.objective.on_policy_fraction
        if fraction < 1:
            return (
                f"teacher.prompt.function with objective.on_policy_fraction={fraction:g}: it "
                "reads what happened in a rollout, and prompts that train on golden solutions "
                "have none; set on_policy_fraction=1, or a template as teacher.prompt"
            )
        if config.rollout.engine == "replay" and config.has_environment:
            return (
                "teacher.prompt.function with rollout.engine=replay and an environment: stored "
                "episodes lack the messages that the function reads; sample them again"
            )
    if config.weights_of["teacher"] == "student" and config.fp8.teacher:
        return (
            f"fp8.teacher={config.fp8.teacher} with teacher.weights=live: the teacher is the "
            "student as it trains; set fp8.teacher=null"
        )
    return None


def _trainer_refusal(config: Any) -> str | None:
    if "student" in (config.memory.offload or ()) and not config.is_colocated:
        return (
            "memory.offload names `student`, which moves only while colocated servers sample: "
            f"rollout.engine={config.rollout.engine}, rollout.sglang.placement="
            f"{config.rollout.sglang.placement}; leave it out, or colocate SGLang servers"
        )
    if config.train.share_prefixes and config.parallel.context > 1:
        return (
            f"train.share_prefixes=true with parallel.context={config.parallel.context}: ranks "
            "that share the tokens of each sequence have no prefix in common; set one of the "
            "two to its default"
        )
    # A wait that ends by itself must end before the watchdog takes it for a hang.
    limit, teacher = config.fault.watchdog_minutes, config.teacher
    served = config.rollout.has_servers or (teacher and teacher.is_served)
    if served and limit is not None and limit <= LONGEST_WAIT_MINUTES:
        return (
            f"fault.watchdog_minutes={limit:g} with SGLang servers, for which a run may wait "
            f"{LONGEST_WAIT_MINUTES} minutes: the watchdog would end a run that only waits; "
            "set it to more than that, or to null"
        )
    return None


def _golden_refusal(config: Any) -> str | None:
    sources = config.data.sources
    mixed = [each for each in sources if config.objective_of(each).name != "sft"] or sources
    if config.largest_lambda and not any(each.may_have_golden for each in mixed):
        key = "mixture.lambda" if config.mixture.lambda_ else "guard.max_lambda"
        return (
            f"{key} > 0 with no column of golden solutions in data.train: set "
            f"data.train.columns.solution, or {key}=0"
        )
    return None


def _environment_refusal(config: Any) -> str | None:
    minutes = config.fault.watchdog_minutes or LARGEST_WATCHDOG_MINUTES
    for source in config.data.sources:
        environment = config.environment_of(source)
        reward = source.reward if source.environment else source.reward or config.reward
        if environment.function is None:
            continue
        if config.rollout.routing_replay and config.rollout.max_staleness:
            return (
                f"rollout.routing_replay=true with rollout.max_staleness="
                f"{config.rollout.max_staleness} and an environment: the weights change between "
                "turns, and the trainer replays the experts that the newest ones chose; set "
                "routing_replay to false or max_staleness to 0"
            )
        if environment.is_agent and (reason := environment.agent_refusal(config.rollout)):
            return reason
        for key, assumes_one in (
            ("objective.discount", config.objective_of(source).discount),
            ("teacher.prompt", config.teacher and config.teacher.prompt),
        ):
            if assumes_one and (reason := environment.several_contexts_refusal(key)):
                return reason
        if reward is not None and reward.function is not None:
            return (
                f"reward.function={reward.function} with environment.function="
                f"{environment.function} for {source.path}: an environment returns the reward "
                "of its episodes; drop one of the two"
            )
        if 2 * environment.timeout_seconds >= 60 * minutes:
            return (
                f"environment.timeout_seconds={environment.timeout_seconds:g}: a step that "
                f"hangs is tried twice, and after {minutes:g} minutes the ranks that wait end "
                f"the run (fault.watchdog_minutes); set less than {30 * minutes:g}"
            )
    return None


def _guard_refusal(config: Any) -> str | None:
    if config.guard.acts and config.is_supervised:
        return (
            "guard.policy=act with objective.name=sft: without rollouts there is nothing to "
            "guard; set guard.policy=off"
        )
    if config.guard.acts and not config.checkpoint.every:
        return (
            "guard.policy=act with checkpoint.every=0: there would be no checkpoint to return "
            "to; set checkpoint.every or guard.policy=warn"
        )
    for key, weight, section in (
        ("kl.beta", config.kl.beta, config.kl),
        ("mixture.lambda", config.mixture.lambda_, config.mixture),
    ):
        if section.target is not None and not weight:
            return (
                f"{key.split('.')[0]}.target={section.target:g} with {key}=0: a target needs a "
                f"weight to start from; set {key} > 0"
            )
    return None


RULES = (
    _paths_refusal,
    _teacher_refusal,
    lora_refusal,
    _trainer_refusal,
    objectives_refusal,
    _golden_refusal,
    teachers_refusal,
    prefix_refusal,
    _environment_refusal,
    _guard_refusal,
)
