"""Seconds a step by phase, from rooflines and link rates.

Every figure is work over rate: products over the matmul rate, weights and caches over the memory
rate, messages over the link rate. Nothing overlaps except what a formula says. The rates' shares
are assumptions (hardware.py), so layouts compare better than absolute seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.training import Offloadable
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.planning.hardware import DEVICES, Device
from stable_opd_mcore.planning.layout import Layout, layout_of
from stable_opd_mcore.planning.memory import Models, stage_plan
from stable_opd_mcore.planning.model_size import WEIGHT_BYTES, ModelSize
from stable_opd_mcore.planning.work import Work, num_micro_batches

# Seconds of one decoding step beside its memory traffic and products.
SGLANG_SECONDS = 0.002  # CUDA graphs
IN_PROCESS_SECONDS = 0.025  # any other engine: Python
ALL_REDUCE_SECONDS = 15e-6  # of one small message between a server's tensor ranks; two a layer
PUBLISH_SECONDS = 0.5  # requests, cache flush and checksums of one weight update


@dataclass(frozen=True)
class Servers:
    """The SGLang servers that draw the rollouts, or the ranks of the embedded engine."""

    count: int
    tensor: int
    own_gpus: bool  # beside the trainer's


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of one step, phase by phase."""

    rollout: float
    score: float
    update: float
    publish: float
    offload: float  # copies of `memory.offload` between GPU and host, in all phases

    @property
    def total(self) -> float:
        return self.rollout + self.score + self.update + self.publish + self.offload


def step_seconds(
    config: Config,
    models: Models,
    layout: Layout,
    device: Device,
    work: Work,
    servers: Servers,
    gpus_per_node: int,
) -> StepSeconds:
    """One step of the run, evaluation and checkpoints excluded."""
    student = ModelSize(models.student, layout)
    forward = _forward_seconds(config, student, layout, device, work, gpus_per_node)
    scorers = [forward] if models.reference else []
    if models.teacher is not None:
        teacher = ModelSize(models.teacher, layout)
        scorers.append(_forward_seconds(config, teacher, layout, device, work, gpus_per_node))
    again = {"none": 0.0, "full": forward}.get(config.train.recompute)
    if again is None:
        again = _forward_seconds(config, student, layout, device, work, gpus_per_node, "mlp")
    heads = [student] + ([student] if models.reference else [])
    if models.teacher is not None:
        heads.append(ModelSize(models.teacher, layout))
    head_flops = sum(size.head_flops(work.scored_rows(config)) for size in heads)
    head_flops += 2 * student.head_flops(work.scored_rows(config))
    # Only the last stage multiplies by the head.
    head = device.matmul_seconds(head_flops / (layout.gpus / layout.pipeline))
    optimizer = _optimizer_seconds(config, student, device, gpus_per_node)
    rollout = _rollout_seconds(config, student, device, work, servers)
    counting = forward if config.train.moe_aux_loss_coeff else 0.0
    # Forward, two products backward, and what the backward pass computes again.
    score, update = sum(scorers), 3 * forward + again + counting + head + optimizer
    offload = _offload_seconds(config, models, layout, device, work)
    publish = 0.0
    if config.rollout.engine == "sglang":
        weights = 2 * student.total_parameters()
        publish = PUBLISH_SECONDS + device.link_seconds(weights, within_node=False)
    if servers.own_gpus and config.rollout.async_steps == 1:  # the next step's, at the same time
        rollout = max(0.0, rollout - score - update - offload)
    return StepSeconds(rollout, score, update, publish, offload)


def embedded_seconds(config: Config, student: Architecture, gpus: int) -> float:
    """One step's rollouts by the embedded engine on `gpus` H200s, of half the longest length."""
    layout = layout_of(config.parallel, gpus)
    work = Work(response_tokens=max(1, config.sampling.max_new_tokens // 2))
    ranks = Servers(layout.gradient_ranks, layout.tensor * layout.pipeline, own_gpus=False)
    return _rollout_seconds(config, ModelSize(student, layout), DEVICES["h200"], work, ranks)


def _forward_seconds(
    config: Config,
    size: ModelSize,
    layout: Layout,
    device: Device,
    work: Work,
    gpus_per_node: int,
    of: Literal["layers", "mlp"] = "layers",
) -> float:
    """One forward pass of all trained tokens, pipeline bubble and messages included.

    Args:
        of: whole layers, or their MLPs alone.
    """
    tokens = work.trained_tokens(config)
    mean_context = (work.prompt_tokens + work.response_tokens) / 2
    flops = size.forward_flops(tokens, mean_context)
    if of == "mlp":
        flops = size.mlp_share() * size.forward_flops(tokens, 0)
    micro_batches = num_micro_batches(config, layout, work)
    bubble = (layout.pipeline - 1) / (micro_batches * layout.virtual)
    compute = device.matmul_seconds(flops / layout.gpus) * (1 + bubble)
    return compute + _message_seconds(size, layout, device, tokens, gpus_per_node, of)


def _message_seconds(
    size: ModelSize, layout: Layout, device: Device, tokens: float, gpus_per_node: int, of: str
) -> float:
    """Tensor- and context-parallel messages of one forward pass, in bf16."""
    model, t, c = size.architecture, layout.tensor, layout.context
    of_rank = tokens / (layout.data * c)
    # A gather and a scatter each of attention and MLP.
    blocks = 1 if of == "mlp" else 2
    per_layer = 2 * blocks * 2 * of_rank * model.hidden_size * (t - 1) / t
    seconds = device.link_seconds(size.layers_per_stage * per_layer, within_node=t <= gpus_per_node)
    if of == "layers":  # keys and values pass every rank
        ring = size.layers_per_stage * 2 * 2 * of_rank * size.key_width / t * (c - 1)
        seconds += device.link_seconds(ring, within_node=t * c <= gpus_per_node)
    if model.experts is None:
        return seconds
    # Each token goes to its experts and comes back, from the tensor rank that holds it.
    sent = 2 * 2 * of_rank / t * model.experts.per_token * model.hidden_size
    sent *= (layout.expert - 1) / layout.expert
    return seconds + device.link_seconds(
        size.layers_per_stage * sent, within_node=layout.expert <= gpus_per_node
    )


def _optimizer_seconds(
    config: Config, student: ModelSize, device: Device, gpus_per_node: int
) -> float:
    """Gradients summed, Adam, weights gathered; once for each of train.minibatches."""
    layout = student.layout
    shared = max(student.shared_parameters(s) for s in {0, layout.pipeline - 1})
    seconds = 0.0
    for parameters, d in (
        (shared, layout.gradient_ranks),
        (student.expert_parameters(), layout.expert_copies),
    ):
        messages = (4 + 2) * parameters * (d - 1) / d
        seconds += device.link_seconds(messages, within_node=layout.gpus <= gpus_per_node)
        shards = d if config.optimizer.distributed else 1
        seconds += device.memory_seconds(7 * 4 * parameters / shards)
    return config.train.minibatches * seconds


def _offload_seconds(
    config: Config, models: Models, layout: Layout, device: Device, work: Work
) -> float:
    """Parts of `memory.offload` between the GPU and the host; no copy overlaps with work.

    As train/phases.py and parallel/device_memory.py move them: `optimizer` and `student` go and
    come once a step, `gradients` are not copied but filled with zeros, and frozen models come once
    from their copy on the host. With a reference that follows the student they go and come for the
    scores, and again at each of its updates.
    """

    def held(stage: int, *parts: Offloadable) -> float:
        """Bytes of the stage's GPU while rollouts are drawn."""
        memory = config.memory.model_copy(update={"offload": parts})
        changed = config.model_copy(update={"memory": memory})
        return stage_plan(changed, models, layout, stage, device, work).bytes_in("rollout")

    reference = config.reference
    frozen = {"never": 1, "every": 2 + 2 / reference.every, "ema": 4}[reference.update]
    student = ModelSize(models.student, layout)
    element = WEIGHT_BYTES[config.train.precision]
    seconds = []
    for stage in {0, layout.pipeline - 1}:
        of_part = {
            "optimizer": 2 * device.host_seconds(held(stage) - held(stage, "optimizer")),
            "gradients": device.memory_seconds(held(stage) - held(stage, "gradients")),
            "frozen": frozen * device.host_seconds(held(stage) - held(stage, "frozen")),
            "student": 2 * device.host_seconds(element * student.stage_parameters(stage)),
        }
        seconds.append(sum(of_part[part] for part in set(config.offloaded)))
    return max(seconds)


def _rollout_seconds(
    config: Config, student: ModelSize, device: Device, work: Work, servers: Servers
) -> float:
    """Until the longest response is complete: weights read once a step, caches once a token."""
    if config.objective.name == "sft" or config.rollout.engine == "replay":
        return 0.0
    drawn = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    of_server = drawn / servers.count
    steps = config.sampling.max_new_tokens  # some response runs to the limit
    weights = 2 * student.read_parameters(of_server) / servers.tensor
    mean_context = work.prompt_tokens + work.response_tokens / 2
    tokens = of_server * work.response_tokens
    cache = tokens * mean_context * student.kv_bytes() / servers.tensor
    products = student.read_parameters(1)
    flops = 2 * products * tokens / servers.tensor
    prompts = 2 * products * of_server * work.prompt_tokens / servers.tensor
    overhead = SGLANG_SECONDS if config.rollout.engine == "sglang" else IN_PROCESS_SECONDS
    messages, sent = 0.0, 0.0
    if servers.tensor > 1:
        model, t = student.architecture, servers.tensor
        messages = 2 * model.num_layers * ALL_REDUCE_SECONDS
        sent = 2 * model.num_layers * tokens * 2 * model.hidden_size * 2 * (t - 1) / t
    return (
        steps * (device.memory_seconds(weights) + overhead + messages)
        + device.memory_seconds(cache)
        + device.matmul_seconds(flops + prompts)
        + device.link_seconds(sent, within_node=True)
    )
