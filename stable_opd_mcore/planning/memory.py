"""Memory of one GPU by component and phase, from a config, its models and a layout.

A step has three phases: rollouts are drawn, the scorers read them, the student is updated. Each
component names the phases in which it is held. Sizes are those of the second step and later ones:
Adam's state exists from the first update on. Not here: how long a phase takes (seconds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.training import Fp8Role
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.planning.attention import deterministic_attention
from stable_opd_mcore.planning.hardware import GIB, Device
from stable_opd_mcore.planning.layout import Layout
from stable_opd_mcore.planning.model_size import ADAM_BYTES, WEIGHT_BYTES, Layers, ModelSize
from stable_opd_mcore.planning.topology import MEMORY_SHARES
from stable_opd_mcore.planning.work import (
    Work,
    largest_share,
    micro_batch_tokens,
    num_micro_batches,
)
from stable_opd_mcore.planning.workspace import (
    backward_bytes,
    forward_bytes,
    gathered_input_bytes,
)

Phase = Literal["rollout", "score", "update"]
PHASES: tuple[Phase, ...] = ("rollout", "score", "update")
PRODUCT_COLUMNS = 2**14  # losses.output_head's, without torch
# What a colocated SGLang server keeps on each GPU while its weights and KV cache are released: its
# CUDA context, kernels, workspaces and CUDA graphs. About 1 to 2 GiB.
RELEASED_SERVER_BYTES = 2 * GIB


@dataclass(frozen=True)
class Models:
    """The models of a run; None where it has none."""

    student: Architecture
    teacher: Architecture | None = None  # in the trainer; a served one takes no memory here
    reference: bool = False  # the student's architecture


@dataclass(frozen=True)
class Component:
    name: str
    bytes: float
    phases: tuple[Phase, ...] = PHASES
    is_rehearsed: bool = True  # whether it is a tensor of the fake world (rehearsal/)


@dataclass(frozen=True)
class MemoryPlan:
    """One pipeline stage's GPU: what it holds."""

    stage: int
    components: tuple[Component, ...]
    usable_bytes: float

    def bytes_in(self, phase: Phase) -> float:
        return sum(item.bytes for item in self.components if phase in item.phases)

    @property
    def rehearsed_bytes(self) -> float:
        """The peak of what the fake world of `stable-opd rehearse` has."""
        rehearsed = tuple(item for item in self.components if item.is_rehearsed)
        return MemoryPlan(self.stage, rehearsed, self.usable_bytes).peak_bytes

    @property
    def peak_phase(self) -> Phase:
        return max(PHASES, key=self.bytes_in)

    @property
    def peak_bytes(self) -> float:
        return self.bytes_in(self.peak_phase)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


def memory_plan(
    config: Config,
    models: Models,
    layout: Layout,
    device: Device,
    work: Work,
    layers: Layers = "transformer_engine",
) -> MemoryPlan:
    """The stage that needs most."""
    plans = [
        stage_plan(config, models, layout, stage, device, work, layers)
        for stage in {0, layout.pipeline - 1}
    ]
    return max(plans, key=lambda plan: plan.peak_bytes)


def stage_plan(
    config: Config,
    models: Models,
    layout: Layout,
    stage: int,
    device: Device,
    work: Work,
    layers: Layers = "transformer_engine",
) -> MemoryPlan:
    """One stage."""
    components = _components(config, models, layout, stage, work, layers)
    if config.is_colocated:
        server = device.memory_gib * GIB * MEMORY_SHARES["colocated"]
        name = "colocated server: weights, KV cache"
        components.append(Component(name, server, ("rollout",), is_rehearsed=False))
        name = "colocated server: what it keeps when released"
        components.append(Component(name, RELEASED_SERVER_BYTES, is_rehearsed=False))
    return MemoryPlan(stage, tuple(components), device.usable_bytes)


def largest_micro_batch(
    config: Config, models: Models, layout: Layout, device: Device, work: Work
) -> int | None:
    """The largest train.micro_batch_tokens that fits, in steps of 1,024; None: not even one.

    At most `largest_share`, from which on a larger budget changes nothing.
    """

    def fits(thousands: int) -> bool:
        train = config.train.model_copy(update={"micro_batch_tokens": 1024 * thousands})
        changed = config.model_copy(update={"train": train})
        return memory_plan(changed, models, layout, device, work).fits

    low, high = 0, largest_share(config, layout, work) // 1024
    if fits(high):
        return 1024 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low if low else None


def _components(
    config: Config, models: Models, layout: Layout, stage: int, work: Work, layers: Layers
) -> list[Component]:
    element = WEIGHT_BYTES[config.train.precision]
    student = ModelSize(models.student, layout, config.train.moe_aux_loss_coeff > 0)
    parameters = student.stage_parameters(stage)
    state = ADAM_BYTES[config.train.precision]
    is_cut = config.optimizer.distributed
    sharded = student.shared_parameters(stage) / (layout.gradient_ranks if is_cut else 1)
    sharded += student.expert_parameters() / (layout.expert_copies if is_cut else 1)
    phases = _phases_held(config)
    parts = [
        Component("student weights", element * parameters, phases["student"]),
        Component("gradients, fp32", 4 * parameters, phases["gradients"]),
        Component("Adam's state", state * sharded, phases["optimizer"]),
    ]
    parts += _fp8_copies(config, student, stage, layers)
    frozen: list[tuple[Fp8Role, ModelSize]] = []
    if models.teacher is not None:
        frozen.append(("teacher", ModelSize(models.teacher, layout)))
    if models.reference:
        frozen.append(("reference", student))
    parts += _frozen_components(config, frozen, stage, layers, element)
    parts += _rollout_components(config, student, stage, work, element)
    tokens = micro_batch_tokens(config, layout, work) / layout.context
    if frozen:
        widest = max(forward_bytes(size, layers, element, tokens) for _, size in frozen)
        parts.append(Component("one layer's activations", widest, ("score",)))
    parts.append(_activations(config, student, stage, work, layers, element))
    if config.train.deterministic and layers == "transformer_engine":
        parts += _attention_components(config, student, frozen, stage, work)
    if gathered := gathered_input_bytes(student, layers, element, tokens):
        parts.append(Component("gathered input of a layer", gathered))
    moment = backward_bytes(student, config.train.recompute, layers, element, tokens)
    if stage == layout.pipeline - 1:
        parts += _loss_components(config, models, student, work, element)
        moment = max(
            moment - student.final_norm_bytes(layers, element) * tokens,  # freed before
            student.final_norm_workspace(layers) * tokens,
            _loss_bytes(config, models, student, work, layers, element),
        )
    parts.append(Component("loss, or backward of a layer", moment, ("update",)))
    return parts


def _frozen_components(
    config: Config,
    frozen: Sequence[tuple[Fp8Role, ModelSize]],
    stage: int,
    layers: Layers,
    element: int,
) -> list[Component]:
    """Weights of the scorers, and what a reference that moves keeps beside them."""
    held, parts = _phases_held(config)["frozen"], list[Component]()
    for role, size in frozen:
        weights, fp8 = element * size.stage_parameters(stage), config.fp8.of(role)
        if fp8 is not None and layers == "transformer_engine":
            weights -= (element - 1) * size.fp8_parameters(stage, fp8)
        parts.append(Component(f"{role} weights", weights, held))
        if role == "teacher":
            continue
        update, parameters = config.reference.update, size.stage_parameters(stage)
        if update == "ema" and element == 2:
            parts.append(Component("reference's average, fp32", 4 * parameters, held))
        elif update != "never" and config.fp8.reference:
            parts.append(Component("reference without FP8", element * parameters, held))
    return parts


def _activations(
    config: Config, student: ModelSize, stage: int, work: Work, layers: Layers, element: int
) -> Component:
    """What is saved for backward, of all micro-batches that the stage has in flight."""
    layout, recompute = student.layout, config.train.recompute
    last = stage == layout.pipeline - 1
    per_token = student.layers_per_stage * student.saved_bytes(recompute, layers, element)
    per_token += student.saved_outside_layers(last, layers, element)
    # Each model chunk keeps what it sends, and what it receives: the saved input of its first
    # layer, except that torch's norm saves another tensor in its place.
    kept = layout.virtual - (1 if last else 0)
    if layers == "torch" and recompute != "full":
        kept += layout.virtual - (1 if stage == 0 else 0)
    sent = element * student.architecture.hidden_size / student.norm_ranks
    per_token += kept * sent
    tokens = micro_batch_tokens(config, layout, work) / layout.context
    number = num_micro_batches(config, layout, work)
    saved = per_token * tokens * min(_in_flight(layout, stage), number)
    # Megatron's schedule lets go of a received tensor and its gradient one micro-batch later.
    before = 2 * sent * tokens if stage > 0 and number > 1 else 0
    return Component("activations", saved + before, ("update",))


def _attention_components(
    config: Config,
    student: ModelSize,
    frozen: Sequence[tuple[Fp8Role, ModelSize]],
    stage: int,
    work: Work,
) -> list[Component]:
    """What train.deterministic costs Transformer Engine's attention (attention.py)."""
    layers = 0.0  # whose scores wait for the backward pass
    if config.train.recompute != "full":
        number = num_micro_batches(config, student.layout, work)
        layers = student.layers_per_stage * min(_in_flight(student.layout, stage), number)
    trained = deterministic_attention(config, student, work)
    parts = [Component(trained.name, trained.trained_bytes(layers), ("update",))]
    scored = [deterministic_attention(config, size, work) for _, size in frozen]
    if scored and (held := max(attention.scored_bytes for attention in scored)):
        parts.append(Component("frozen attention's scores, unfused", held, ("score",)))
    return parts


def _fp8_copies(config: Config, student: ModelSize, stage: int, layers: Layers) -> list[Component]:
    """Transformer Engine casts the student's weights once a step, for both directions of a GEMM."""
    fp8 = config.fp8.of("student")
    if fp8 is None or layers == "torch":
        return []
    copies = 2 * student.fp8_parameters(stage, fp8)
    return [Component("student weights in FP8, twice", copies)]


def _phases_held(config: Config) -> dict[str, tuple[Phase, ...]]:
    """When each value of memory.offload is on the GPU (train/phases.py)."""
    needed: dict[str, tuple[Phase, ...]] = {
        "student": PHASES,  # colocated servers read the weights while they hold their own
        "gradients": ("update",),
        "optimizer": ("update",),
        "frozen": ("score",),
    }
    return {name: held if name in config.offloaded else PHASES for name, held in needed.items()}


def _rollout_components(
    config: Config, student: ModelSize, stage: int, work: Work, element: int
) -> list[Component]:
    layout = student.layout
    if config.objective.name == "sft":
        return []
    if config.rollout.engine == "sglang":
        return _publish_components(config, student, stage, element)
    if config.rollout.engine == "replay":
        return []
    drawn = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    tokens = work.prompt_tokens + config.sampling.max_new_tokens
    per_token = student.kv_bytes(element) / (layout.tensor * layout.pipeline)
    cache = drawn / layout.gradient_ranks * tokens * per_token
    return [Component("KV cache", cache, ("rollout",), is_rehearsed=False)]


def _publish_components(
    config: Config, student: ModelSize, stage: int, element: int
) -> list[Component]:
    """Buckets of a publish and the tensor that is gathered for one (rollout/sglang/sync.py)."""
    layout = student.layout
    largest = element * student.head_rows * layout.tensor * student.architecture.hidden_size
    buckets = 2 * max(config.rollout.sglang.bucket_mib * 2**20, largest)
    parts = [Component("weight sync buckets", buckets, ("rollout",), is_rehearsed=False)]
    # Owners gather shards and join them; other stages receive the whole tensor.
    is_cut = layout.tensor > 1 and stage in (0, layout.pipeline - 1)
    copies = 2 if is_cut else min(1, layout.pipeline - 1)
    if copies:
        whole = Component("weight sync: embedding, whole", copies * largest, ("rollout",))
        parts.append(whole)
    return parts


def _loss_components(
    config: Config, models: Models, student: ModelSize, work: Work, element: int
) -> list[Component]:
    """What the last stage holds beside its layers, from before the loss on."""
    layout, needs = student.layout, _hidden_states_needed(config, models)
    rows = work.scored_rows(config) / layout.gradient_ranks
    kept = element * rows * sum(needs)
    heads = _aligned_heads(models, student, element)
    if "frozen" in config.offloaded:  # the loss multiplies their heads
        columns = element * student.head_rows * sum(needs)
        heads.append(Component("heads of the scorers", columns, ("update",)))
    return [
        *heads,
        Component("hidden states of the scorers", kept, ("score", "update")),
    ]


def _aligned_heads(models: Models, student: ModelSize, element: int) -> list[Component]:
    """The teacher's head where its shards begin at other rows (losses/output_head.align_head)."""
    teacher, layout = models.teacher, student.layout
    if teacher is None or layout.tensor == 1:
        return []
    if ModelSize(teacher, layout).head_rows == student.head_rows:
        return []
    copy = element * student.head_rows * teacher.hidden_size
    return [Component("teacher's head, cut as the student's", copy)]


def _loss_bytes(
    config: Config, models: Models, student: ModelSize, work: Work, layers: Layers, element: int
) -> float:
    """What the fused loss holds: hidden states, and a block's logits of every model it reads."""
    hidden, length = models.student.hidden_size, work.prompt_tokens + work.response_tokens
    tokens = micro_batch_tokens(config, student.layout, work) / student.layout.context
    responses = tokens * work.response_tokens / length
    # All hidden states, gathered; those of the responses, and their gradient.
    held = element * (tokens + 2 * responses) * hidden
    # losses/output_head.rows_per_block: as many rows as shards, so that the block's bytes stay.
    rows = min(config.train.loss_block_tokens * student.layout.tensor, responses)
    # Another temperature than 1: a copy of the golden rows' logits, at most of the whole block.
    has_golden = config.largest_lambda > 0 or config.objective.name == "sft"
    copies = 1 if has_golden and config.sampling.temperature != 1 else 0
    blocks = 1 + len(_hidden_states_needed(config, models)) + copies
    held += element * rows * student.head_rows * blocks
    if layers == "torch" and element == 2:  # a CPU multiplies slices of the gradient in fp32
        columns = min(PRODUCT_COLUMNS, student.head_rows)
        after = min(PRODUCT_COLUMNS, student.head_rows - columns)
        held += 4 * rows * (columns + max(after, hidden))
    return held


def _hidden_states_needed(config: Config, models: Models) -> list[int]:
    """Hidden sizes of the scorers whose hidden states the loss reads."""
    objective, needed = config.objective, []
    whole = objective.name in ("gkd", "student_topk") or objective.advantage.control_variate
    whole = whole or "divergence" in objective.needs
    if models.teacher is not None and whole:
        needed.append(models.teacher.hidden_size)
    if models.reference and config.kl.estimator == "exact":
        needed.append(models.student.hidden_size)
    return needed


def _in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations stage `stage` holds at once under 1F1B, in whole stages."""
    if layout.virtual == 1:
        return layout.pipeline - stage
    extra = (layout.pipeline - stage - 1) * 2 + (layout.virtual - 1) * layout.pipeline + 1
    return min(extra / layout.virtual, layout.pipeline * 2)


def with_layout(config: Config, layout: Layout) -> Config:
    """The config with this layout in place of its own."""
    changes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "sequence": layout.sequence,
        "virtual_pipeline": layout.virtual if layout.virtual > 1 else None,
        "expert": layout.expert,
    }
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})
