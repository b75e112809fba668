"""Memory of one GPU by component and phase, from a run.

A step has three phases: rollouts are sampled, the scorers read them, the student is updated. Each
component names the phases in which it is held. Sizes are those of the second step and later ones:
Adam's state exists from the first update on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stable_opd_mcore.commands.plan.planned_run import PlannedRun
from stable_opd_mcore.config.training import Fp8Role, Offloadable
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.peft_settings import WEIGHTS
from stable_opd_mcore.placement.hardware import GIB
from stable_opd_mcore.placement.model_size import ADAM_BYTES
from stable_opd_mcore.placement.topology import (
    MEMORY_SHARES,
    WEIGHT_BUCKET_BYTES,
    sends_adapter,
)

Phase = Literal["rollout", "score", "update"]
PHASES: tuple[Phase, ...] = ("rollout", "score", "update")
# When a part of memory.offload is on the GPU if it is offloaded (train/phases.py). Colocated
# servers read the student's weights while they hold their own.
PHASES_OF_OFFLOADED: dict[Offloadable, tuple[Phase, ...]] = {
    "student": PHASES,
    "gradients": ("update",),
    "optimizer": ("update",),
    "frozen": ("score",),
}
BLOCK_ROWS = 1024  # losses.output_head's, without torch
# What a colocated SGLang server keeps on each GPU while its weights and KV cache are released: its
# CUDA context, kernels, NCCL's buffers, workspaces and CUDA graphs. An assumption: together they
# are 3 to 5 GiB; no GPU has measured it.
RELEASED_SERVER_BYTES = 4 * GIB


@dataclass(frozen=True)
class Component:
    name: str
    bytes: float
    phases: tuple[Phase, ...] = PHASES
    part: Offloadable | None = None  # its name in memory.offload


@dataclass(frozen=True)
class MemoryPlan:
    """One pipeline stage's GPU: what it holds."""

    stage: int
    components: tuple[Component, ...]
    usable_bytes: float

    def bytes_in(self, phase: Phase) -> float:
        return sum(item.bytes for item in self.components if phase in item.phases)

    def bytes_of(self, part: Offloadable) -> float:
        """What an offload of this part moves."""
        return sum(item.bytes for item in self.components if item.part == part)

    @property
    def peak_phase(self) -> Phase:
        return max(PHASES, key=self.bytes_in)

    @property
    def peak_bytes(self) -> float:
        return self.bytes_in(self.peak_phase)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


def memory_plan(run: PlannedRun) -> MemoryPlan:
    """The stage that needs most."""
    plans = [stage_plan(run, stage) for stage in {0, run.layout.pipeline - 1}]
    return max(plans, key=lambda plan: plan.peak_bytes)


def stage_plan(run: PlannedRun, stage: int) -> MemoryPlan:
    """One stage."""
    components = [*_student(run, stage), *_frozen(run, stage), *_rollouts(run, stage)]
    components += [*_passes(run, stage), *_colocated_server(run)]
    offloaded = run.config.offloaded
    held = (
        replace(item, phases=PHASES_OF_OFFLOADED[item.part]) if item.part in offloaded else item
        for item in components
    )
    return MemoryPlan(stage, tuple(held), run.device.usable_bytes)


def largest_micro_batch(run: PlannedRun) -> int | None:
    """The largest train.micro_batch_tokens that fits and has an effect; None: not even 1,024."""

    def fits(thousands: int) -> bool:
        return memory_plan(run.changed(train={"micro_batch_tokens": 1024 * thousands})).fits

    low, high = 0, run.largest_share // 1024
    if fits(high):
        return 1024 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low if low else None


def _student(run: PlannedRun, stage: int) -> Iterator[Component]:
    """The weights, and gradients and optimizer's shards of what is trained."""
    config, student, layout = run.config, run.student, run.layout
    weights = run.element * student.stage_parameters(stage)
    shared, experts = student.shared_parameters(stage), student.expert_parameters(stage)
    if lora := config.student.lora:
        shared = student.factor_parameters(lora, stage)
        experts = student.expert_factor_parameters(lora, stage)
    sharded = shared / layout.gradient_ranks + experts / layout.expert_copies
    state = ADAM_BYTES[config.train.precision] * sharded
    yield Component("student weights", weights, part="student")
    if lora:
        factors = run.element * (shared + experts)
        yield Component("student's low-rank factors", factors, part="student")
    yield Component("gradients, fp32", 4 * (shared + experts), part="gradients")
    yield Component("Adam's state", state, part="optimizer")
    # Transformer Engine casts the weights once a step, for both directions of a GEMM.
    if config.fp8.student:
        yield Component("student weights in FP8, twice", 2 * student.fp8_parameters(stage))


def _frozen(run: PlannedRun, stage: int) -> Iterator[Component]:
    """Weights of the scorers, and what one that follows the student also keeps."""
    config, element = run.config, run.element
    if in_turn := run.turn_bytes(stage):
        yield Component("the largest teacher's weights", max(in_turn), ("score",))
    if config.teacher and config.teacher.adapters:
        files = [directory / WEIGHTS for directory in config.teacher.adapters.values()]
        held = sum(file.stat().st_size for file in files if file.is_file())
        yield Component("adapters of teachers, whole", held)
    for role, size in run.frozen.items():
        if not run.stays(role):
            continue
        weights, fp8 = element * size.stage_parameters(stage), config.fp8.of(role)
        if fp8 is not None:
            weights -= (element - 1) * size.fp8_parameters(stage)
        yield Component(f"{role} weights", weights, part="frozen")
        update, parameters = config.reference.update, size.stage_parameters(stage)
        if role == "teacher":
            update = "ema" if config.teacher and config.teacher.weights == "ema" else "never"
        if update == "ema" and element == 2:
            yield Component(f"{role}'s average, fp32", 4 * parameters, part="frozen")
        elif update != "never" and fp8 is not None:
            yield Component(f"{role} without FP8", element * parameters, part="frozen")


def _rollouts(run: PlannedRun, stage: int) -> Iterator[Component]:
    config, layout, student, rollout = run.config, run.layout, run.student, run.config.rollout
    if config.is_supervised or rollout.engine == "replay":
        return
    if not rollout.has_servers:
        row = run.longest * student.kv_bytes(run.element, layout.tensor)
        row += student.state_bytes(run.element) / layout.tensor
        cache = run.rollouts / layout.gradient_ranks * row / layout.pipeline
        yield Component("KV cache", cache, ("rollout",))
        return
    # Buckets of a publish and the tensor that is gathered for one (rollout/sglang/sync.py).
    embedding = student.head_rows * layout.tensor * student.architecture.hidden_size
    largest = run.element * embedding
    model, stack = student.architecture, 0
    if model.experts and model.family.stacked_experts:  # gate and up of a layer, sent at once
        gate_up = 2 * model.ffn_hidden_size * model.hidden_size
        stack = run.element * model.experts.number * gate_up
    buckets = 2 * max(WEIGHT_BUCKET_BYTES, largest, stack)
    yield Component("weight sync buckets", buckets, ("rollout",))
    # Owners gather shards and join them; other stages receive the whole tensor.
    is_cut = layout.tensor > 1 and stage in (0, layout.pipeline - 1)
    copies = 2 if is_cut else min(1, layout.pipeline - 1)
    if copies:
        yield Component("weight sync: embedding, whole", copies * largest, ("rollout",))
    if config.student.lora and not sends_adapter(config, student.architecture):
        # A merge holds the products of joined matrices in fp32, their join and its rounded copy.
        # The embedding is whole at another time, so only what exceeds it counts.
        merged = max(0, (8 + run.element) * student.widest_matrix() - copies * largest)
        yield Component("weight sync: merged matrix", merged, ("rollout",))


def _passes(run: PlannedRun, stage: int) -> Iterator[Component]:
    """What forward and backward passes hold, and on the last stage the loss."""
    student, tokens = run.student, run.rank_tokens
    if run.frozen:
        widest = max(n.forward_bytes(run.of_scorer(r).rank_tokens) for r, n in run.frozen.items())
        yield Component("one layer's activations", widest, ("score",))
    yield Component("activations", _activation_bytes(run, stage), ("update",))
    moment = student.backward_bytes(run.config.train.recompute, tokens)
    if stage == run.layout.pipeline - 1:
        yield from _loss_inputs(run)
        moment -= student.final_norm_bytes() * tokens  # freed before
        moment = max(moment, _loss_bytes(run))
    yield Component("loss, or backward of a layer", moment, ("update",))


def _activation_bytes(run: PlannedRun, stage: int) -> float:
    """What is saved for backward in all micro-batches that the stage has in flight."""
    layout, student, recompute = run.layout, run.student, run.config.train.recompute
    last = stage == layout.pipeline - 1
    per_token = student.saved_by_layers(recompute, stage)
    per_token += student.saved_outside_layers(last)
    # Each model chunk keeps what it sends; what it receives is the saved input of its first layer.
    sent = run.element * student.local_hidden
    per_token += (layout.virtual - (1 if last else 0)) * sent
    saved = per_token * run.rank_tokens * _in_flight(run, stage)
    # Megatron's schedule lets go of a received tensor and its gradient one micro-batch later.
    before = 2 * sent * run.rank_tokens if stage > 0 and run.num_micro_batches > 1 else 0
    return saved + before


def _in_flight(run: PlannedRun, stage: int) -> float:
    """Activations that stage `stage` holds at once under 1F1B.

    1 is those of the largest micro-batch in all layers of the stage. Scored micro-batches come
    first; the others may be smaller.
    """
    stages, virtual = run.layout.pipeline, run.layout.virtual
    held: float = stages - stage
    if virtual > 1:
        extra = (stages - stage - 1) * 2 + (virtual - 1) * stages + 1
        held = min(extra / virtual, stages * 2)
    tokens = 0.0
    for sequences in run.kinds:
        count = min(held, run.num_micro_batches_of(sequences))
        tokens += min(count * run.micro_batch_tokens, run.share(sequences))
        held -= count
    return tokens / run.micro_batch_tokens


def _loss_inputs(run: PlannedRun) -> Iterator[Component]:
    """What the last stage holds next to its layers, from before the loss on."""
    student, teacher, element = run.student, run.frozen.get("teacher"), run.element
    # losses/output_head.align_head: where the teacher's shards begin at other rows.
    if teacher and run.layout.tensor > 1 and teacher.head_rows != student.head_rows:
        copy = element * student.head_rows * teacher.architecture.hidden_size
        yield Component("teacher's head, cut as the student's", copy)
    needed = _hidden_states_needed(run)
    widths = sum(needed.values())
    if run.models.in_turn and "teacher" in needed:
        head = element * student.head_rows * needed["teacher"]
        yield Component("the largest teacher's head", head, ("update",))
    if "frozen" in run.config.offloaded:  # the loss multiplies their heads
        own = sum(
            width
            for role, width in needed.items()
            if run.config.weights_of[role] not in ("student", "base")
            and not (role == "teacher" and run.models.in_turn)
        )
        columns = element * student.head_rows * own
        yield Component("heads of the scorers", columns, ("update",))
    kept = element * (run.scored_rows / run.layout.gradient_ranks) * widths
    yield Component("hidden states of the scorers", kept, ("score", "update"))
    of_teacher = needed.get("teacher", 0)
    if of_teacher and run.of_scorer("teacher") is not run:
        # scoring/own_prompt.py: those of all context ranks, in the teacher's order
        moved = run.element * (run.scored_rows / run.layout.data) * of_teacher
        yield Component("teacher's hidden states on their way", moved, ("score",))


def _loss_bytes(run: PlannedRun) -> float:
    """What the fused loss holds: hidden states, and a block's logits of every model it reads."""
    config, student, element = run.config, run.student, run.element
    hidden, tokens = student.architecture.hidden_size, run.rank_tokens
    responses = tokens * run.work.response_tokens / run.work.tokens
    # All hidden states, gathered; those of the responses, and their gradient.
    held = element * (tokens + 2 * responses) * hidden
    # losses/output_head.rows_per_block: rows grow with the shards, so a block keeps its bytes.
    rows = min(BLOCK_ROWS * run.layout.tensor, responses)
    # At other temperatures the logits of off-policy golden rows are copied, a block at most.
    copies = 1 if run.scored > run.rollouts and config.sampling.temperature != 1 else 0
    blocks = 1 + len(_hidden_states_needed(run)) + copies
    return held + element * rows * student.head_rows * blocks


def _teachers(run: PlannedRun) -> list[Architecture]:
    of_section = run.models.teacher
    return [] if of_section is None else [of_section, *run.models.in_turn.values()]


def _hidden_states_needed(run: PlannedRun) -> dict[Fp8Role, int]:
    """Hidden sizes of the scorers whose hidden states the loss reads; the widest teacher's."""
    needed: dict[Fp8Role, int] = {}
    whole = any(
        each.name in ("gkd", "student_topk")
        or each.advantage.control_variate
        or "divergence" in each.needs
        for each in run.config.objectives
    )
    if run.models.teacher is not None and whole:
        needed["teacher"] = max(model.hidden_size for model in _teachers(run))
    if run.models.reference and run.config.kl.estimator == "exact":
        needed["reference"] = run.models.student.hidden_size
    return needed


def _colocated_server(run: PlannedRun) -> Iterator[Component]:
    if not run.config.is_colocated:
        return
    share = run.device.memory_gib * GIB * MEMORY_SHARES["colocated"]
    name = "colocated server: weights, KV cache"
    yield Component(name, share, ("rollout",))
    name = "colocated server: what it keeps when released"
    yield Component(name, RELEASED_SERVER_BYTES)
