"""Build a run's parts from its config, and refuse those that do not fit together."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from stable_opd_mcore.config.changes import by_dotted_key
from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.sources import source_name
from stable_opd_mcore.evaluation.grading import Grader, Rewards
from stable_opd_mcore.inputs.loading import (
    configured_architecture,
    episode_template,
    load_rollout_prompts,
    prompt_order,
    refuse_long_support,
    refuse_prefixes_of_delta_nets,
    refuse_routing_without_experts,
)
from stable_opd_mcore.inputs.run_inputs import Place, RunInputs
from stable_opd_mcore.models.layers.attention_backend import Batch, attention_lines
from stable_opd_mcore.models.layers.gated_delta_net import delta_net_engine
from stable_opd_mcore.models.spec import fp8_engine
from stable_opd_mcore.parallel.determinism import make_deterministic
from stable_opd_mcore.parallel.world import World, ranks_on_this_machine, start_world
from stable_opd_mcore.placement.hardware import DEVICES, Cluster
from stable_opd_mcore.rollout.build_engine import build_engine, embedded_engine, training_sampling
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.rollout.sglang.group import prepare_nccl
from stable_opd_mcore.rollout.sglang.server_setup import (
    refuse_expandable_segments,
    refuse_unbuildable_kernels,
)
from stable_opd_mcore.train.phases import device_memory, refuse_idle_offload
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.run_models import RunModels
from stable_opd_mcore.train.student import Student


def start_configured_world(config: Config) -> World:
    """Start the config's world, after the settings that torch and NCCL read as they start.

    Raises:
        UserError: see `start_world`; servers that could not start, or could not get weights.
    """
    if torch.cuda.is_available():
        refuse_expandable_segments(config)
        refuse_unbuildable_kernels(config)
    if config.train.deterministic:
        make_deterministic()
    prepare_nccl(config)
    wait = timedelta(minutes=config.fault.start_minutes)
    return start_world(config.parallel, config.train.seed, common_settings(config), wait)


def common_settings(config: Config) -> dict[str, Any]:
    """What every rank must have, without what may differ between machines: the directory of a
    download, and where servers listen."""
    settings = by_dotted_key(config.model_dump(mode="json", by_alias=True))
    downloaded = [key for key in config.models_in_trainer if settings.get(f"{key}.revision")]
    own = {"rollout.sglang.host", "rollout.sglang.port", *(f"{key}.path" for key in downloaded)}
    return {key: value for key, value in settings.items() if key not in own}


def place_of(world: World) -> Place:
    """This job's GPUs, by their short name where placement/hardware.py has it."""
    ranks_per_node = ranks_on_this_machine()
    nodes = world.world_size // ranks_per_node
    if world.device.type == "cpu":
        return Place(Cluster(nodes, ranks_per_node), "cpu")
    spare = max(0, torch.cuda.device_count() - ranks_per_node)
    cluster = Cluster(nodes, ranks_per_node, spare_gpus=spare)
    name = torch.cuda.get_device_name(world.device).lower()
    return Place(cluster, next((known for known in DEVICES if known in name), name))


def build_run(
    inputs: RunInputs,
    world: World,
    stop_requested: Callable[[], bool] = lambda: False,
    progress: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """Build every part on this rank.

    Args:
        inputs: the config, and what its files say; what has been read is not read again.
        stop_requested: whether a signal has asked the run to stop; then absent servers are not
            waited for.
        progress: called from any thread whenever a server has answered or a token is decoded.
        say: receives a line before each part that takes long.

    Raises:
        UserError: settings, data, weights or layout that do not fit together.
    """
    config = inputs.config
    say(f"reading prompts: {', '.join(source.path for source in config.data.sources)}")
    tokenizer, objective = inputs.tokenizer, inputs.objective
    refuse_long_support(objective, tokenizer.vocab_size)
    refuse_routing_without_experts(config, inputs.architecture)
    refuse_prefixes_of_delta_nets(config, inputs.architecture)
    # What the run may need later is loaded now: the guard may raise beta and lambda from 0.
    widest = objective.with_loss_weights(config.largest_beta, config.largest_lambda)
    prompts, held_out = inputs.prompts, inputs.held_out

    say(f"{len(prompts):,} prompts; loading models: {models_text(config)}")
    models = RunModels(config, world, widest, tokenizer.vocab_size, progress)
    student = Student(models.student, config.optimizer, config.train.precision)
    memory = device_memory(config, world, student, models.frozen, models.heads, models.in_turn)
    teacher, reference = models.teacher(memory), models.reference()
    overlap = models.overlap(teacher, tokenizer.stop_token_ids, inputs.all_teacher_stops)
    served_teacher = models.served_teacher(teacher, overlap)
    models.keep_heads(teacher, reference, overlap and overlap.teacher.scorer)
    refuse_idle_offload(config, models.frozen)
    in_turn = [each.chunks for each in models.in_turn.values()]
    loaded = [models.student, models.frozen, *in_turn]
    for line in attention_lines(loaded, largest_batch(inputs)):
        say(line)
    rollout_prompts = load_rollout_prompts(config, tokenizer, objective)
    # What a rollout's end says, and its siblings, can be in no prompt that is sent before.
    scored_early = served_teacher is not None and rollout_prompts is None
    if config.rollout.has_servers:
        say(f"waiting for {config.rollout.sglang.placement} SGLang servers")
    engine = build_engine(
        *(config, world, models.student, tokenizer, stop_requested, progress, memory),
        served_teacher,
        episode_template(config, tokenizer, objective),
    )
    return Run(
        config=config,
        world=world,
        tokenizer=tokenizer,
        student=student,
        head=models.head,
        teacher=teacher,
        served_teacher=served_teacher,
        reference=reference,
        moving=models.moving,
        behaviour=models.behaviour(student),
        rollout_prompts=rollout_prompts,
        overlap=overlap,
        memory=memory,
        engine=engine,
        held_out_engine=_held_out_engine(config, world, models, tokenizer, progress),
        sampling=training_sampling(config, tokenizer.stop_token_ids, scored=scored_early),
        objective=objective,
        prompts=prompts,
        held_out=held_out,
        order=prompt_order(config, prompts),
        grader=Grader(rewards=rewards_of(config)),
    )


def largest_batch(inputs: RunInputs) -> Batch:
    """The largest micro-batch, of sequences whose length is at least what may follow a prompt."""
    longest = int(min(inputs.config.longest_context, inputs.architecture.max_positions))
    train = inputs.config.train
    return Batch(max(train.micro_batch_tokens, longest), longest, train.share_prefixes)


def _held_out_engine(
    config: Config,
    world: World,
    models: RunModels,
    tokenizer: Tokenizer,
    progress: Callable[[], None],
) -> RolloutEngine | None:
    """What samples evaluations of a run that replays its rollouts; None: the run's engine."""
    if config.rollout.engine != "replay":
        return None
    return embedded_engine(config, world, models.student, tokenizer, progress)


def rewards_of(config: Config) -> Rewards:
    """The functions of the user's that judge rollouts, as `Grader` takes them."""
    named = {source_name(each): each.reward for each in config.data.sources if each.reward}
    given = {"": config.reward, **named}
    return {name: reward.read() if reward.function else None for name, reward in given.items()}


def models_text(config: Config) -> str:
    """The models that a run loads, from where, what is trained, what computes FP8 and gated delta
    nets, and which experts are not read in the type of their files."""
    of_teacher = config.teacher.models if config.teacher else {}
    named: dict[str, ModelConfig | None] = {"student": config.student, "teacher": config.teacher}
    named |= {f"teacher.models.{name}": model for name, model in of_teacher.items()}
    adapters = {f"teacher.models.{key}": model.adapter for key, model in of_teacher.items()}
    found = [
        f"{name} {model.path or adapters.get(name) or '(random weights)'}"
        for name, model in named.items()
        if model is not None
    ]
    if lora := config.student.lora:
        start = "" if lora.path is None else f" from {lora.path}"
        found[0] += f" with low-rank factors of rank {lora.rank}{start}"
    engines = [fp8_engine()] if config.fp8.is_on else []
    read = {role: configured_architecture(m) for role, m in config.models_in_trainer.items()}
    if any(architecture.delta_net for architecture in read.values()):
        engines.append(delta_net_engine())
    if packed := [role for role, architecture in read.items() if architecture.mxfp4]:
        engines.append(
            f"the MXFP4 experts of {' and '.join(packed)} are read as bf16, and exported as such"
        )
    return "; ".join([", ".join(found), *engines])
