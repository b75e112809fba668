"""Settings of the training: layout, optimizer, steps, checkpoints, faults. Loads without torch."""

from dataclasses import dataclass
from typing import Literal, Self, cast

from pydantic import Field, PositiveInt, model_validator

from stable_opd_mcore.config.section import Section


class ParallelConfig(Section):
    """How a model is cut over ranks. Data parallelism is what remains of the world size."""

    tensor: PositiveInt = 1
    """Tensor-parallel ranks."""
    pipeline: PositiveInt = 1
    """Pipeline stages."""
    virtual_pipeline: PositiveInt | None = None
    """Model chunks of each stage (interleaved pipeline); `null`: one."""
    sequence: bool = False
    """Shard activations outside attention and MLP over the tensor-parallel ranks."""
    context: PositiveInt = 1
    """Ranks that share the tokens of each sequence."""
    expert: PositiveInt = 1
    """Ranks over which the experts of a layer are divided. They are the tensor, context and
    data-parallel ranks of one pipeline stage, in this order: no further ranks are needed. A dense
    model is not changed by it. It must be 1 where student and teacher are dense."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence=true with parallel.tensor=1: it shards over the tensor ranks; "
                "set sequence to false, or tensor to more than 1"
            )
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline={self.virtual_pipeline} with parallel.pipeline=1: it "
                "divides pipeline stages; set it to null, or pipeline to more than 1"
            )
        if self.expert % self.tensor and self.tensor % self.expert:
            raise ValueError(
                f"parallel.expert={self.expert} and parallel.tensor={self.tensor}: one must divide "
                "the other, so that whole replicas share experts; change one of them"
            )
        return self


class OptimizerConfig(Section):
    """Adam (AdamW with `weight_decay`) and its learning rate."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step of a `linear` or `cosine` schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up, from lr / warmup_steps."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment; that of the first is 0.9."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; a larger gradient is scaled down to it."""

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(
                f"optimizer.min_lr={self.min_lr:g} exceeds optimizer.lr={self.lr:g}: the schedule "
                "would raise the rate; lower min_lr"
            )
        return self


Recompute = Literal["none", "selective", "full"]


class TrainConfig(Section):
    """Steps, precision and memory."""

    steps: PositiveInt = 800
    """Training steps, each with its own batch of rollouts."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of prompts, of sampling and of random weights."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of weights and activations. Gradients and the optimizer's weights are fp32 with
    either."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens packed into one micro-batch, over all ranks of `parallel.context`. A longer sequence
    has a micro-batch of its own."""
    share_prefixes: bool = False
    """Compute what sequences of a micro-batch have in common at their beginning once, in scoring
    and in training: the prompt of its rollouts, the history of an episode's contexts. It pays where
    prompts are long beside responses: docs/planning.md."""
    minibatches: PositiveInt = 1
    """Optimizer steps per batch of rollouts; the prompts are dealt to them in turn."""
    recompute: Recompute = "none"
    """Activations of the student that the backward pass computes again: `full` whole layers,
    `selective` the MLPs, which keep most of them."""
    deterministic: bool = False
    """Deterministic algorithms in torch, cuBLAS, Transformer Engine and NCCL: what a resume that is
    exact to the bit needs on a GPU. It costs speed. SGLang servers need `rollout.sglang.arguments:
    [--enable-deterministic-inference]` too. Where a micro-batch has 2^30 or more elements of
    attention (its sequences times a tensor rank's heads times the square of its longest sequence),
    Transformer Engine 2.20 has no such fused kernel: each layer then takes 6 bytes an element,
    which `plan` does not count, and `parallel.context` above 1 ends the run."""


Fp8Recipe = Literal["tensorwise", "blockwise"]
Fp8Role = Literal["student", "teacher", "reference"]


@dataclass(frozen=True)
class Fp8:
    """The FP8 of one model."""

    role: Fp8Role
    recipe: Fp8Recipe

    @property
    def setting(self) -> str:
        """The setting as messages name it."""
        return f"fp8.{self.role}={self.recipe}"


class Fp8Config(Section):
    """Matrix products of the layers in FP8, for each model separately: docs/fp8.md. Embedding,
    norms, attention scores, output head and loss stay in `train.precision`, and so does what is
    saved and served. Without Transformer Engine the products are emulated, which is slow."""

    student: Fp8Recipe | None = None
    """Scales of weights, inputs and gradients. `tensorwise`: one per tensor, from its values.
    `blockwise`: one per 128 x 128 values of a weight and per 128 values of an input or gradient.
    `null`: no FP8."""
    teacher: Fp8Recipe | None = None
    """The same for a teacher in the trainer. Its weights are held in FP8."""
    reference: Fp8Recipe | None = None
    """The same for the reference."""

    def of(self, role: str) -> Fp8 | None:
        """The FP8 of a model, of `Fp8Role` or below it as `teacher.models.NAME`; None: it computes
        in `train.precision`."""
        section = cast("Fp8Role", role.partition(".")[0])
        recipe: Fp8Recipe | None = getattr(self, section)
        return None if recipe is None else Fp8(section, recipe)

    @property
    def is_on(self) -> bool:
        """Whether any model has FP8."""
        return bool(self.student or self.teacher or self.reference)


Offloadable = Literal["student", "optimizer", "gradients", "frozen"]


class MemoryConfig(Section):
    """What leaves the trainer's GPUs while a phase of the step does not need it."""

    offload: tuple[Offloadable, ...] | None = None
    """Parts that move to the host between the phases that need them. `optimizer` and `gradients`:
    needed by the update. `frozen`: teacher and reference in the trainer, needed to score; the loss
    keeps their heads. `student`: its weights, while colocated servers sample. `null`: all of them
    with colocated SGLang servers, nothing otherwise."""
    teachers_directory: str | None = None
    """A directory on a local disk of each node, in whose files the models of `teacher.models` wait
    for their turn. The files have no names and end with the run. `null`: they wait in pinned host
    memory."""


class CheckpointConfig(Section):
    """When training state is saved."""

    every: int = Field(default=100, ge=0)
    """Steps between checkpoints; 0: only at the end and when the run is stopped."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""


COLLECTIVE_TIMEOUT_MINUTES = 24 * 60
"""Longest wait in a collective. It must be far above the watchdog's limit. The watchdog names the
rank that hangs; a collective that times out earlier ends ranks that only wait for that rank."""
LONGEST_WAIT_MINUTES = 40  # a run's longest wait for silent servers, see serving/timeouts.py
LARGEST_WATCHDOG_MINUTES = COLLECTIVE_TIMEOUT_MINUTES / 4


class FaultConfig(Section):
    """What ends a run that hangs."""

    start_minutes: float = Field(default=30.0, gt=0)
    """Longest wait for ranks to start; after a third of it without a further rank it ends."""
    watchdog_minutes: float | None = Field(default=60.0, gt=0)
    """Longest time without a finished step, an answer of a server or a sampled token; then every
    rank writes its stacks and exits. At most 360. `null`: only the time-out of the collectives, 24
    hours, ends a run that hangs."""

    @model_validator(mode="after")
    def _watchdog_first(self) -> Self:
        if self.watchdog_minutes is not None and self.watchdog_minutes > LARGEST_WATCHDOG_MINUTES:
            raise ValueError(
                f"fault.watchdog_minutes={self.watchdog_minutes:g} is more than a quarter of the "
                f"collectives' time-out of {COLLECTIVE_TIMEOUT_MINUTES} minutes, which would end "
                "the ranks that wait before the watchdog writes their stacks: set at most "
                f"{LARGEST_WATCHDOG_MINUTES:g}, or null"
            )
        return self


class ColdStartConfig(Section):
    """Supervised steps on golden solutions before distillation: a run of `objective.name: sft` in
    `<run>/cold_start`. Settings not named here are taken from the run."""

    steps: PositiveInt
    """Supervised steps."""
    lr: float = Field(gt=0)
    """Learning rate after the warm-up."""
    prompts_per_step: PositiveInt = 64
    """Golden solutions of one step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
