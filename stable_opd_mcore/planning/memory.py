"""Memory of one GPU by component and phase, from a config, its models and a layout.

A step has three phases: rollouts are drawn, the scorers read them, the student is updated. Each
component names the phases in which it is held. Sizes are those of the second step and later ones:
Adam's state exists from the first update on. Not here: how long a phase takes (seconds.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.training import Fp8Role
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.planning.hardware import GIB, Device
from stable_opd_mcore.planning.layout import Layout
from stable_opd_mcore.planning.model_size import Layers, ModelSize
from stable_opd_mcore.planning.topology import MEMORY_SHARES

Phase = Literal["rollout", "score", "update"]
PHASES: tuple[Phase, ...] = ("rollout", "score", "update")


@dataclass(frozen=True)
class Work:
    """Lengths and counts of one step that the config does not fix."""

    prompt_tokens: int = 256  # mean
    response_tokens: int = 4096  # mean, of rollouts and golden solutions

    def sequences(self, config: Config) -> int:
        """Rollouts and golden solutions of one step, over all ranks."""
        prompts = config.rollout.prompts_per_step
        golden = prompts if config.largest_lambda > 0 or config.objective.name == "sft" else 0
        drawn = 0 if config.objective.name == "sft" else prompts * config.rollout.samples_per_prompt
        return drawn + golden

    def trained_tokens(self, config: Config) -> int:
        """Prompt and response tokens of one step, over all ranks."""
        return self.sequences(config) * (self.prompt_tokens + self.response_tokens)

    def scored_rows(self, config: Config) -> int:
        """Response tokens of one step, over all ranks."""
        return self.sequences(config) * self.response_tokens


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


@dataclass(frozen=True)
class MemoryPlan:
    """One pipeline stage's GPU: what it holds."""

    stage: int
    components: tuple[Component, ...]
    usable_bytes: float

    def bytes_in(self, phase: Phase) -> float:
        return sum(item.bytes for item in self.components if phase in item.phases)

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
        components.append(Component("colocated server: weights, KV cache", server, ("rollout",)))
    return MemoryPlan(stage, tuple(components), device.usable_bytes)


def largest_micro_batch(
    config: Config, models: Models, layout: Layout, device: Device, work: Work
) -> int | None:
    """The largest train.micro_batch_tokens that fits, in steps of 1,024; None: not even one."""

    def fits(thousands: int) -> bool:
        train = config.train.model_copy(update={"micro_batch_tokens": 1024 * thousands})
        changed = config.model_copy(update={"train": train})
        return memory_plan(changed, models, layout, device, work).fits

    low, high = 0, 1024
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low if low else None


def micro_batch_tokens(config: Config, layout: Layout, work: Work) -> float:
    """Tokens of the largest micro-batch: a sequence longer than the budget stands alone."""
    longest = work.prompt_tokens + config.sampling.max_new_tokens
    budget = max(config.train.micro_batch_tokens, longest)
    sequences = math.ceil(work.sequences(config) / layout.data / config.train.minibatches)
    return min(budget, sequences * (work.prompt_tokens + work.response_tokens))


def _components(
    config: Config, models: Models, layout: Layout, stage: int, work: Work, layers: Layers
) -> list[Component]:
    element = 2 if config.train.precision == "bf16" else 4
    student = ModelSize(models.student, layout)
    parameters = student.stage_parameters(stage)
    # bf16: Adam keeps fp32 weights and two moments; fp32: the weights are the model's own.
    state = 12 if element == 2 else 8
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
    for role, size in frozen:
        held = element * size.stage_parameters(stage)
        fp8 = config.fp8.of(role)
        if fp8 is not None and layers == "transformer_engine":
            held -= (element - 1) * size.fp8_parameters(stage, fp8)
        parts.append(Component(f"{role} weights", held, phases["frozen"]))
    if models.reference and config.reference.update == "ema" and element == 2:
        average = 4 * student.stage_parameters(stage)
        parts.append(Component("reference's average, fp32", average, phases["frozen"]))
    elif models.reference and config.reference.update != "never" and config.fp8.reference:
        kept = element * student.stage_parameters(stage)
        parts.append(Component("reference without FP8", kept, phases["frozen"]))
    parts += _rollout_components(config, student, work, element)
    last = stage == layout.pipeline - 1
    if last:
        parts += _loss_components(config, models, student, work, element)

    tokens = micro_batch_tokens(config, layout, work) / layout.context
    scored = [size for _, size in frozen]
    if scored:
        widest = max(size.saved_bytes("none", layers, element) for size in scored)
        parts.append(Component("one layer's activations", widest * tokens, ("score",)))
    per_token = student.layers_per_stage * student.saved_bytes(
        config.train.recompute, layers, element
    )
    per_token += student.saved_outside_layers(last, layers, element)
    in_flight = min(_in_flight(layout, stage), num_micro_batches(config, layout, work))
    parts.append(Component("activations", per_token * tokens * in_flight, ("update",)))
    # Backward holds the gradients of one layer's activations, or the activations it recomputes. The
    # loss's logits are freed before.
    workspace = student.saved_bytes("none", layers, element) * tokens
    if last:
        workspace = max(workspace, _logits_bytes(config, models, student, tokens, element))
    parts.append(Component("backward workspace or logits", workspace, ("update",)))
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
    config: Config, student: ModelSize, work: Work, element: int
) -> list[Component]:
    layout = student.layout
    if config.objective.name == "sft":
        return []
    if config.rollout.engine == "sglang":
        buckets = 2 * config.rollout.sglang.bucket_mib * 2**20
        return [Component("weight sync buckets", buckets, ("rollout",))]
    if config.rollout.engine == "replay":
        return []
    drawn = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    tokens = work.prompt_tokens + config.sampling.max_new_tokens
    per_token = student.kv_bytes(element) / (layout.tensor * layout.pipeline)
    cache = drawn / layout.gradient_ranks * tokens * per_token
    return [Component("KV cache", cache, ("rollout",))]


def _loss_components(
    config: Config, models: Models, student: ModelSize, work: Work, element: int
) -> list[Component]:
    """What the last stage holds beside its layers, without the fused loss's logits."""
    layout, needs = student.layout, _hidden_states_needed(config, models)
    rows = work.scored_rows(config) / layout.gradient_ranks
    kept = element * rows * sum(needs)
    tokens = micro_batch_tokens(config, layout, work) / layout.context
    hidden = 2 * element * tokens * models.student.hidden_size  # gathered, and its gradient
    heads = _aligned_heads(models, student, element)
    if "frozen" in config.offloaded:  # the loss multiplies their heads
        columns = element * student.head_rows * sum(needs)
        heads.append(Component("heads of the scorers", columns, ("update",)))
    return [
        *heads,
        Component("hidden states of the scorers", kept, ("score", "update")),
        Component("loss: hidden states, gradient", hidden, ("update",)),
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


def _logits_bytes(
    config: Config, models: Models, student: ModelSize, tokens: float, element: int
) -> float:
    """A block's logits of every model that the fused loss reads; `tokens` of a micro-batch."""
    # losses/output_head.rows_per_block: as many rows as shards, so that the block's bytes stay.
    rows = min(config.train.loss_block_tokens * student.layout.tensor, tokens)
    # Another temperature than 1: a copy of the golden rows' logits, at most of the whole block.
    has_golden = config.largest_lambda > 0 or config.objective.name == "sft"
    copies = 1 if has_golden and config.sampling.temperature != 1 else 0
    blocks = 1 + len(_hidden_states_needed(config, models)) + copies
    return element * rows * student.head_rows * blocks


def _hidden_states_needed(config: Config, models: Models) -> list[int]:
    """Hidden sizes of the scorers whose hidden states the loss reads."""
    objective, needed = config.objective, []
    whole = objective.name in ("gkd", "student_topk") or objective.advantage.control_variate
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


def num_micro_batches(config: Config, layout: Layout, work: Work) -> int:
    """Of one data-parallel rank and one optimizer step."""
    tokens = work.trained_tokens(config) / layout.data / config.train.minibatches
    return max(1, round(tokens / micro_batch_tokens(config, layout, work)))


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
