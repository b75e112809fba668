"""Seconds a step by phase, from rooflines and link rates.

Every figure is work over rate: products over the matmul rate, weights and caches over the memory
rate, messages over the link rate. Nothing overlaps except what a formula says. The rates' shares
are assumptions (hardware.py), so layouts compare better than absolute seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.planning.hardware import DEVICES, GIB, Cluster
from stable_opd_mcore.planning.job import Job, Models, default_work
from stable_opd_mcore.planning.lag import Drawing, publish_every, waiting_seconds
from stable_opd_mcore.planning.memory import stage_plan
from stable_opd_mcore.planning.model_size import ModelSize
from stable_opd_mcore.planning.topology import MEMORY_SHARES

# Seconds of one decoding step beside its memory traffic and products.
SGLANG_SECONDS = 0.002  # CUDA graphs
IN_PROCESS_SECONDS = 0.025  # any other engine: Python
ALL_REDUCE_SECONDS = 15e-6  # of one small message between a server's tensor ranks; two a layer
PUBLISH_SECONDS = 0.5  # requests, cache flush and checksums of one weight update


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of one step, phase by phase."""

    rollout: float  # in which the trainer waits for responses
    score: float
    update: float
    publish: float
    offload: float  # copies of `memory.offload` between GPU and host, in all phases

    @property
    def total(self) -> float:
        return self.rollout + self.score + self.update + self.publish + self.offload


def step_seconds(job: Job) -> StepSeconds:
    """One step of the run, evaluation and checkpoints excluded.

    Raises:
        UserError: servers without a place.
    """
    config, student, device = job.config, job.student, job.device
    forward = _forward_seconds(job, student, job.kinds)
    again = {"none": 0.0, "full": forward}.get(config.train.recompute)
    if again is None:
        again = _forward_seconds(job, student, job.kinds, "mlp")
    # One product forward with every head, two more backward with the student's; only the last
    # stage multiplies by a head.
    head_flops = 3 * student.head_flops(job.response_rows)
    head_flops += sum(size.head_flops(job.scored_rows) for size in job.frozen.values())
    head = device.matmul_seconds(head_flops / (job.layout.gpus / job.layout.pipeline))
    score = sum(
        _forward_seconds(job.of_scorer(role), size, [job.scored])
        for role, size in job.frozen.items()
    )
    # Forward, two products backward, and what the backward pass computes again.
    update = 3 * forward + again + head + _optimizer_seconds(job)
    offload, publish, rollout, draw = _offload_seconds(job), 0.0, 0.0, _drawing(job)
    if config.rollout.engine == "sglang":
        weights = 2 * student.total_parameters()
        publish = PUBLISH_SECONDS + device.link_seconds(weights, within_node=False)
    if draw is not None:
        # Servers draw while the trainer computes; the embedded engine takes its time all the same.
        has_servers = config.rollout.engine == "sglang"
        staleness = config.rollout.max_staleness if has_servers else 0
        partial, busy = config.rollout.partial, score + update + offload
        rollout = waiting_seconds(draw, busy, publish, staleness, partial)
        publish /= publish_every(staleness, partial)
    return StepSeconds(rollout, score, update, publish, offload)


def embedded_seconds(config: Config, student: Architecture, gpus: int) -> float:
    """One step's rollouts by the embedded engine on `gpus` H200s, of half the longest length."""
    models, device = Models(student), DEVICES["h200"]
    draw = _drawing(Job(config, models, Cluster(1, gpus), device, default_work(config)))
    return draw.together(1) if draw else 0.0


def _forward_seconds(
    job: Job, size: ModelSize, kinds: Sequence[int], of: Literal["layers", "mlp"] = "layers"
) -> float:
    """One forward pass, pipeline bubble and messages included.

    Args:
        kinds: sequences of one step that it reads, over all ranks; as Job.kinds.
        of: whole layers, or their MLPs alone.
    """
    layout, tokens = job.layout, sum(kinds) * job.work.tokens
    flops = size.forward_flops(tokens, job.work.tokens / 2)
    if of == "mlp":
        share = size.architecture.mlp_products / size.architecture.layer_products
        flops = share * size.forward_flops(tokens, 0)
    # A stage waits for all others once, for each as long as the largest micro-batch takes.
    largest = max(count / job.num_micro_batches_of(count) for count in kinds) / sum(kinds)
    bubble = (layout.pipeline - 1) * largest / layout.virtual
    compute = job.device.matmul_seconds(flops / layout.gpus) * (1 + bubble)
    return compute + _message_seconds(job, size, tokens, of)


def _message_seconds(job: Job, size: ModelSize, tokens: int, of: Literal["layers", "mlp"]) -> float:
    """Tensor- and context-parallel messages of one forward pass, in bf16."""
    model, layout, per_node = size.architecture, job.layout, job.cluster.gpus_per_node
    t, c = layout.tensor, layout.context
    of_rank = tokens / (layout.data * c)

    def seconds(of_layer: float, ranks: int) -> float:
        sent = size.layers_per_stage * of_layer
        return job.device.link_seconds(sent, within_node=ranks <= per_node)

    # A gather and a scatter each of attention and MLP.
    blocks = 1 if of == "mlp" else 2
    found = seconds(2 * blocks * 2 * of_rank * model.hidden_size * (t - 1) / t, t)
    if of == "layers":  # keys and values pass every rank
        found += seconds(2 * 2 * of_rank * size.key_width / t * (c - 1), t * c)
    if model.experts is None:
        return found
    # Each token goes to its experts and comes back, from the tensor rank that holds it.
    sent = 2 * 2 * of_rank / t * model.experts.per_token * model.hidden_size
    return found + seconds(sent * ((layout.expert - 1) / layout.expert), layout.expert)


def _optimizer_seconds(job: Job) -> float:
    """Gradients summed, Adam, weights gathered; once for each of train.minibatches."""
    layout, student, device = job.layout, job.student, job.device
    shared = max(student.shared_parameters(s) for s in {0, layout.pipeline - 1})
    within_node, seconds = layout.gpus <= job.cluster.gpus_per_node, 0.0
    for parameters, d in (
        (shared, layout.gradient_ranks),
        (student.expert_parameters(), layout.expert_copies),
    ):
        messages = (4 + 2) * parameters * (d - 1) / d
        seconds += device.link_seconds(messages, within_node=within_node)
        seconds += device.memory_seconds(7 * 4 * parameters / d)
    return job.config.train.minibatches * seconds


def _offload_seconds(job: Job) -> float:
    """Parts of `memory.offload` between the GPU and the host; no copy overlaps with work.

    As train/phases.py and parallel/device_memory.py move them: `optimizer` and `student` go and
    come once a step, `gradients` are not copied but filled with zeros, and frozen models come once
    from their copy on the host. With a reference that follows the student they go and come for the
    scores, and again at each of its updates.
    """
    reference, device, seconds = job.config.reference, job.device, []
    teacher_moves = job.config.teacher is not None and job.config.teacher.weights == "ema"
    update = "ema" if teacher_moves else reference.update
    frozen = {"never": 1, "every": 2 + 2 / reference.every, "ema": 4}[update]
    for stage in {0, job.layout.pipeline - 1}:
        held = stage_plan(job, stage).bytes_of
        of_part = {
            "optimizer": 2 * device.host_seconds(held("optimizer")),
            "gradients": device.memory_seconds(held("gradients")),
            "frozen": frozen * device.host_seconds(held("frozen")),
            "student": 2 * device.host_seconds(held("student")),
        }
        seconds.append(sum(of_part[part] for part in set(job.config.offloaded)))
    return max(seconds)


def _drawing(job: Job) -> Drawing | None:
    """One step's rollouts: weights read once a decoding step, caches once a token; None: none."""
    config, student, device, work = job.config, job.student, job.device, job.work
    if not job.drawn or config.rollout.engine == "replay":
        return None
    placement = job.topology.placement
    if placement is None:  # the embedded engine's replicas
        servers, tensor = job.layout.gradient_ranks, job.layout.tensor * job.layout.pipeline
    else:
        servers = len(job.topology.servers)
        # That of external servers is not known.
        tensor = job.topology.tensor or config.rollout.sglang.tensor or 1
    of_server = job.drawn / servers
    weights = 2 * student.read_parameters(of_server) / tensor
    tokens = of_server * work.response_tokens
    mean_context = work.prompt_tokens + work.response_tokens / 2
    context_bytes = mean_context * student.kv_bytes() / tensor
    products = student.read_parameters(1)
    flops = 2 * products * tokens / tensor
    prompts = 2 * products * of_server * work.prompt_tokens / tensor
    overhead = SGLANG_SECONDS if config.rollout.engine == "sglang" else IN_PROCESS_SECONDS
    messages, sent, slots = 0.0, 0.0, math.inf
    if tensor > 1:
        model = student.architecture
        messages = 2 * model.num_layers * ALL_REDUCE_SECONDS
        sent = 2 * model.num_layers * tokens * 2 * model.hidden_size * 2 * (tensor - 1) / tensor
    if placement is not None:
        held = MEMORY_SHARES[placement] * device.memory_gib * GIB
        slots = max(1.0, (held - 2 * student.total_parameters() / tensor) / context_bytes)
    return Drawing(
        step=device.memory_seconds(weights) + overhead + messages,
        longest=config.sampling.max_new_tokens,  # some response runs to the limit
        tokens=tokens,
        work=device.memory_seconds(tokens * context_bytes)
        + device.matmul_seconds(flops + prompts)
        + device.link_seconds(sent, within_node=True),
        slots=slots,
        again=device.matmul_seconds(2 * products * mean_context / tensor),
    )
