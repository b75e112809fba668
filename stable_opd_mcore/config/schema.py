"""Every setting of a run, in one frozen, typed tree. Loads without torch.

One owner per value: the temperature lives in `sampling`, the reference's weight in `kl.beta`, the
stop ids of a model in its own section. Relations between settings are checked here when they need
nothing but the settings (parallel sizes against the world size are checked where the world is
known).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )


class RunConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    directory: str = "runs"

    @property
    def path(self) -> Path:
        """All that the run writes lies in it."""
        return Path(self.directory) / self.name


class ModelConfig(Section):
    """A Hugging Face model directory, or an inline architecture of random weights."""

    path: str | None = None  # directory with config.json and safetensors
    architecture: dict[str, Any] | None = None  # config.json's fields, inline; random weights
    random_init: bool = False  # take only config.json from `path`, draw the weights
    stop_token_ids: tuple[int, ...] | None = None  # None: from the model's configs and tokenizer

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.architecture is not None:
            raise ValueError("give either path or architecture, not both")
        return self


class TeacherConfig(ModelConfig):
    engine: Literal["megatron", "sglang"] = "megatron"
    # engine=sglang: addresses of servers. urls: replicas of one teacher. routes: several teachers,
    # by the source of the prompt (prompt_id before its colon).
    urls: tuple[str, ...] = ()
    routes: dict[str, tuple[str, ...]] = {}
    api_key_file: str | None = None  # holds the servers' key; None: they ask for none
    request_timeout_seconds: float = Field(default=600.0, gt=0)
    # replicas asked twice may differ by this
    self_test_tolerance: float = Field(default=1e-3, gt=0)

    @model_validator(mode="after")
    def _served(self) -> Self:
        if (self.engine == "sglang") != bool(self.urls or self.routes):
            raise ValueError("teacher.engine=sglang and teacher.urls or teacher.routes go together")
        if self.urls and self.routes:
            raise ValueError("give either teacher.urls (one teacher) or teacher.routes (several)")
        return self


class ReferenceConfig(Section):
    path: str | None = None  # None: the student's weights when the run starts


class TokenizerConfig(Section):
    path: str | None = None  # None: student.path; "synthetic": the arithmetic task's characters


class ParallelConfig(Section):
    """Data parallelism is what remains of the world size."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt | None = None
    sequence: bool = False
    context: PositiveInt = 1
    expert: PositiveInt = 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence=true needs parallel.tensor > 1 (it shards over the tensor ranks)"
            )
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise ValueError("parallel.virtual_pipeline needs parallel.pipeline > 1")
        if self.expert != 1:
            raise ValueError(f"parallel.expert={self.expert} is not supported yet: set it to 1")
        return self


class ColumnsConfig(Section):
    problem: str = "problem"
    answer: str | None = "answer"
    solution: str | None = "solution"


class SourceConfig(Section):
    """Where prompts come from: "synthetic:arithmetic", a .jsonl or .parquet file, a datasets
    directory or a hub id.
    """

    path: str
    split: str = "train"
    columns: ColumnsConfig = ColumnsConfig()
    limit: PositiveInt | None = None  # the first n rows
    options: dict[str, Any] = {}  # of the synthetic task


class DataConfig(Section):
    train: SourceConfig
    eval: SourceConfig | None = None
    prompt_template: str = "{problem}"
    system_prompt: str | None = None
    overlong: Literal["error", "drop"] = "error"  # prompt or golden solution longer than the window


class SamplingConfig(Section):
    # of rollouts, and of every log-probability the loss compares
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: PositiveInt = 1024


class SglangConfig(Section):
    """SGLang servers that draw the rollouts, and how the student's weights reach them."""

    # colocated: on the trainer's machine and GPUs, memory released while training; disaggregated:
    # on the trainer's machine, devices of their own; external: started by others (`stable-opd
    # serve`), see urls.
    placement: Literal["colocated", "disaggregated", "external"] = "disaggregated"
    urls: tuple[str, ...] = ()  # external only
    num_servers: PositiveInt = 1  # of all data-parallel ranks together; each owns its share
    tensor: PositiveInt = 1  # ranks of one server the run starts; external ones state theirs
    # disaggregated, with GPUs: servers take the devices from here on
    first_gpu: int = Field(default=0, ge=0)
    host: str = "127.0.0.1"
    # of the first server, then counted up; 0: any free ones
    port: int = Field(default=0, ge=0, le=65535)
    # Holds the servers' key; `stable-opd serve` makes it. None: no key on loopback, on any other
    # host a random one that only this run knows.
    api_key_file: str | None = None
    python: str = ".venv-sglang/bin/python"  # of the servers' own venv
    dtype: Literal["float32", "bfloat16"] | None = None  # None: train.precision
    max_running_requests: PositiveInt | None = None  # of one server
    arguments: tuple[str, ...] = ()  # more of SGLang's own, as on its command line
    startup_timeout_seconds: float = Field(default=600.0, gt=0)
    request_timeout_seconds: float = Field(default=1800.0, gt=0)  # of one prompt's responses
    # a server that misses two probes is hung
    health_interval_seconds: float = Field(default=10.0, gt=0)
    max_restarts: int = Field(default=3, ge=0)  # of one data-parallel rank's servers, over the run
    sync: Literal["distributed", "tensor", "disk"] = "distributed"
    # the trainer's address as the servers see it; None: of the interface that leads to them
    sync_host: str | None = None
    sync_timeout_seconds: float = Field(default=600.0, gt=0)  # of one bucket
    # of weights that travel at once; the sender keeps two of these, a server holds one
    bucket_mib: PositiveInt = 512

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.placement == "external") != bool(self.urls):
            raise ValueError(
                "sglang.placement=external and sglang.urls=[http://HOST:PORT, ...] go together"
            )
        if self.placement == "external" and self.sync == "tensor":
            raise ValueError(
                "sglang.sync=tensor shares memory, so it needs servers this run starts itself"
            )
        return self


class RolloutConfig(Section):
    engine: Literal["embedded", "replay", "sglang"] = "embedded"
    prompts_per_step: PositiveInt = 64
    samples_per_prompt: PositiveInt = 4
    replay_from: str | None = None  # a run directory whose rollouts/ are read again, step by step
    save: Literal["all", "samples", "none"] = "all"  # samples: the first 16 of each step
    sglang: SglangConfig = SglangConfig()
    async_steps: Literal[0, 1] = 0  # 1: the next step's rollouts are drawn while this one trains
    # oldest weights a rollout may come from, in published versions
    max_staleness: int = Field(default=0, ge=0)
    # Train/inference mismatch: weigh tokens by trainer's over engine's probability, cut at the
    # threshold (truncated), or drop those outside [1/threshold, threshold] (masked).
    importance_correction: Literal["none", "truncated", "masked"] = "none"
    importance_threshold: float = Field(default=2.0, gt=1)

    @model_validator(mode="after")
    def _replay(self) -> Self:
        if (self.engine == "replay") != (self.replay_from is not None):
            raise ValueError("rollout.engine=replay and rollout.replay_from=RUN go together")
        return self

    @model_validator(mode="after")
    def _one_step_off(self) -> Self:
        if self.async_steps and self.engine != "sglang":
            raise ValueError(
                "rollout.async_steps=1 needs rollout.engine=sglang: other engines train in turn"
            )
        if self.async_steps and self.sglang.placement == "colocated":
            raise ValueError(
                "rollout.async_steps=1 needs servers with devices of their own, not colocated ones"
            )
        if self.async_steps > self.max_staleness:
            raise ValueError(
                f"rollout.async_steps={self.async_steps} draws from weights one step old: "
                "set rollout.max_staleness=1"
            )
        return self


class AdvantageConfig(Section):
    control_variate: bool = False  # vOPD: A + KL(student || teacher)
    power: float | None = Field(default=None, gt=0)  # PowerOPD: teacher^alpha - student^alpha
    clamp: float | None = Field(default=None, gt=0)  # to [-clamp, clamp]


class TokenMasksConfig(Section):
    special_token_ids: tuple[int, ...] = ()  # first occurrence per response of each id
    truncated_rollouts: bool = False
    repetitive_tail: bool = False


class ObjectiveConfig(Section):
    name: str = "opd"  # a name of losses.objectives
    clip: float = Field(default=0.2, gt=0)
    discount: float = Field(default=0.0, ge=0, le=1)  # gamma of the return-to-go; 0 is token-level
    # sum each model's own stop ids where the sampled token is one; all of them are one outcome
    # where whole distributions are compared
    stop_class: bool = True
    top_k: PositiveInt = 32  # lsm, student_topk
    divergence: Literal["forward", "reverse", "jsd"] = "reverse"  # gkd
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    # gkd's lambda: share of prompts trained on rollouts
    on_policy_fraction: float = Field(default=1.0, ge=0, le=1)
    std_normalise: bool = True  # grpo; false with aggregation=constant is Dr.GRPO
    advantage: AdvantageConfig = AdvantageConfig()
    masks: TokenMasksConfig = TokenMasksConfig()


class KLConfig(Section):
    beta: float = Field(default=0.0, ge=0)
    estimator: Literal["exact", "k3"] = "exact"


class MixtureConfig(Section):
    lambda_: float = Field(default=0.0, ge=0, alias="lambda")


class OptimizerConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, gt=0)
    # shard optimizer state over data-parallel ranks; costs nothing over one, whose checkpoints
    # others resume
    distributed: bool = True


class TrainConfig(Section):
    steps: PositiveInt = 800
    seed: int = Field(default=0, ge=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    # packed, before parallel.context cuts them; a longer sequence stands alone
    micro_batch_tokens: PositiveInt = 16384
    minibatches: PositiveInt = 1  # optimizer steps per rollout batch
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: PositiveInt = 1024  # tokens whose logits exist at once in the loss


class CheckpointConfig(Section):
    every: int = Field(default=100, ge=0)  # steps; 0: only at the end
    keep: PositiveInt = 2


class EvaluationConfig(Section):
    # steps; 0: never (step 0 and the last step are evaluated otherwise)
    every: int = Field(default=50, ge=0)
    num_samples: PositiveInt | None = None  # k of avg@k; None: 1, or the benchmark's own
    # what `stable-opd evaluate` runs in place of data.eval: names of evaluation.benchmarks
    benchmarks: tuple[str, ...] = ()
    # of <name>.jsonl or <name>.parquet; None: the hub, or its cache where there is no internet
    benchmark_directory: str | None = None
    temperature: float = Field(default=0.6, ge=0)  # 0: greedy
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: PositiveInt | None = None  # None: sampling.max_new_tokens
    also_greedy: bool = False  # a second, greedy pass beside the sampled one
    # measured with `stable-opd evaluate` on the teacher: the report then shows the gap recovered
    teacher_accuracy: float | None = Field(default=None, ge=0, le=1)
    grading_timeout_seconds: float = Field(default=10.0, gt=0)


class MonitoringConfig(Section):
    tensorboard: bool = True
    wandb: bool = False  # needs the wandb package; its own settings say where the run goes
    repetition_tail_characters: PositiveInt | None = None  # None: min(10000, 2.5 x max_new_tokens)
    # bytes / zlib bytes above which a tail counts as repetitive
    repetition_ratio: float = Field(default=10.0, gt=1)
    # steps between two looks at the top tokens of student and teacher (overlap/*, stop/*), one more
    # forward pass of each; 0: never
    overlap_every: int = Field(default=10, ge=0)


class FaultConfig(Section):
    """What ends a run that cannot go on."""

    # without a step: every rank writes its stacks and exits; None: wait for ever
    watchdog_minutes: float | None = Field(default=60.0, gt=0)


class ColdStartConfig(Section):
    """Supervised steps on golden solutions before distillation, as a run of its own inside this
    one.
    """

    steps: PositiveInt
    lr: float = Field(gt=0)
    prompts_per_step: PositiveInt = 64
    warmup_steps: int = Field(default=0, ge=0)


class Config(Section):
    run: RunConfig
    student: ModelConfig
    teacher: TeacherConfig | None = None
    reference: ReferenceConfig = ReferenceConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    kl: KLConfig = KLConfig()
    mixture: MixtureConfig = MixtureConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    cold_start: ColdStartConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault: FaultConfig = FaultConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.student.path is None and self.student.architecture is None:
            raise ValueError(
                "student needs path (a Hugging Face directory) or architecture (random weights)"
            )
        if self.tokenizer.path is None and self.student.path is None:
            raise ValueError(
                "tokenizer.path is needed when the student has no path to take it from"
            )
        if self.teacher and self.teacher.engine == "sglang" and self.sampling.temperature != 1:
            raise ValueError(
                f"sampling.temperature={self.sampling.temperature} with teacher.engine=sglang: a "
                "server scores prompts at temperature 1 alone, so its log-probabilities would not "
                "compare with the student's; set sampling.temperature=1 or teacher.engine=megatron"
            )
        if self.teacher and self.teacher.engine == "sglang" and self.parallel.context > 1:
            raise ValueError(
                f"parallel.context={self.parallel.context} with teacher.engine=sglang: a server "
                "scores whole sequences, and each rank holds a slice; set parallel.context=1 or "
                "teacher.engine=megatron"
            )
        if self.objective.name == "sft" and self.kl.beta:
            raise ValueError("kl.beta needs rollouts: objective.name=sft has none; set kl.beta=0")
        if self.mixture.lambda_ and self.data.train.columns.solution is None:
            raise ValueError(
                "mixture.lambda > 0 needs golden solutions: set data.train.columns.solution"
            )
        return self
