"""Settings of the rollouts: sampling, the engine, SGLang servers. Loads without torch."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from stable_opd_mcore.config.horizon import horizon_at, require_growth
from stable_opd_mcore.config.prefix_settings import PrefixConfig
from stable_opd_mcore.config.section import Section, Urls

MAX_STALENESS = 8  # the largest rollout.max_staleness


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the rollouts and of every log-probability that the loss compares; at least
    0.001. Golden solutions are trained at temperature 1, whatever this is."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability kept by nucleus sampling. Log-probabilities use the full softmax at any value."""
    max_new_tokens: PositiveInt = 1024
    """Longest response; a longer one is truncated."""
    horizon_start: PositiveInt | None = None
    """Longest response of the first step. It grows linearly, to `max_new_tokens` after
    `horizon_steps`, or to that of an environment for its turns; until then the guard rests. `null`:
    `max_new_tokens` in every step."""
    horizon_steps: PositiveInt | None = None
    """With `horizon_start`: steps until responses may have `max_new_tokens`."""

    def budget(self, step: int, largest: int | None = None) -> int:
        """Longest response of the step that follows `step` finished ones: docs/method.md §3.

        largest: of a turn whose environment has a limit of its own; None: `max_new_tokens`.
        """
        most = largest or self.max_new_tokens
        return horizon_at(step, self.horizon_start, self.horizon_steps, most)

    @model_validator(mode="after")
    def _horizon_grows(self) -> Self:
        start, steps = self.horizon_start, self.horizon_steps
        require_growth("sampling", start, steps, "max_new_tokens", self.max_new_tokens)
        return self


class SpeculativeConfig(Section):
    """A frozen draft, which proposes tokens that the servers' student accepts or replaces."""

    algorithm: Literal["mtp", "eagle3"]
    """`mtp`: the layer for multi-token prediction in the student's own directory (Qwen3.5,
    Qwen3-Next, GLM, DeepSeek-V3). `eagle3`: a model of its own, in `draft`."""
    draft: str | None = None
    """Directory of the draft. `null`, with `mtp`: `student.path`."""
    steps: PositiveInt = 3
    """Tokens that the draft proposes one after another before the student judges them."""
    top_k: PositiveInt = 1
    """Alternatives of the draft at each step; over 1 they are a tree."""
    tokens: PositiveInt | None = None
    """Tokens of the tree that the student judges at once. `null`: `steps` + 1, a chain's."""

    @property
    def judged(self) -> int:
        """`tokens`, or a chain's."""
        return self.tokens or self.steps + 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.algorithm == "eagle3" and self.draft is None:
            raise ValueError("speculative.algorithm=eagle3 without draft: name its directory")
        if self.top_k == 1 and self.judged != self.steps + 1:
            raise ValueError(
                f"speculative.top_k=1 with tokens={self.tokens}: a chain of {self.steps} steps has "
                f"{self.steps + 1}; set tokens=null, or top_k=2 for a tree"
            )
        if self.top_k > 1 and self.tokens is None:
            raise ValueError(
                f"speculative.top_k={self.top_k} without tokens: a tree needs the number of tokens "
                "that the student judges at once; set tokens, or top_k=1"
            )
        return self


class SglangConfig(Section):
    """SGLang servers that sample the rollouts, and how the student's weights reach them."""

    placement: Literal["colocated", "disaggregated", "external"] = "disaggregated"
    """`colocated`: the run starts servers on the trainer's GPUs; they release their memory while
    the trainer needs it. `disaggregated`: the run starts servers on other GPUs of the trainer's
    machine. `external`: `stable-opd serve` or someone else started them; see `urls`."""
    urls: Urls = ()
    """Addresses of the `external` servers."""
    num_servers: PositiveInt | None = None
    """Servers on each machine. `null`: as many as its GPUs hold; on a CPU 1, or one per rank where
    they are `colocated`."""
    tensor: PositiveInt | None = None
    """Tensor-parallel ranks of one server. `null`: the smallest power of two that holds the student
    and as much KV cache; at least `parallel.tensor` where `colocated`; 1 on a CPU."""
    host: str = "127.0.0.1"
    """Address on which started servers listen."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first server, counted up for the others. 0: any free ports."""
    api_key_file: str | None = None
    """File with the servers' API key. `null`: a random key of the run; `stable-opd serve` writes it
    to `sglang/api_key` (with `--teacher`: `teacher/api_key`) of its run directory. A run with
    `external` servers names that file, or sends no key."""
    python: str = ".venv-sglang/bin/python"
    """Interpreter of the environment in which SGLang is installed."""
    arguments: tuple[str, ...] = ()
    """More arguments of SGLang's command line, such as [--max-running-requests, "64"]."""
    sync: Literal["distributed", "tensor", "disk"] | None = None
    """How weights travel. `distributed`: broadcast over NCCL or gloo. `tensor`: CUDA IPC between
    processes on one GPU, shared memory on a CPU. `disk`: safetensors in the run directory, which
    the servers must see. `null`: `tensor` to `colocated` servers, `distributed` to others."""
    lora: Literal["adapter", "merged"] | None = None
    """What a publish sends of a student with `student.lora`. `adapter`: the frozen weights once in
    a server's life, then the factors of each version, over HTTP. `merged`: matrices with the
    factors added and rounded, all of them each time. `null`: `adapter`, but `merged` for a student
    with experts or gated delta nets, whose adapters SGLang does not serve in full."""
    speculative: SpeculativeConfig | None = None
    """Speculative decoding with a frozen draft: docs/servers.md. `null`: none."""
    verify: Literal["refuse", "warn"] = "refuse"
    """If a server's checksums differ after a publish, or the log-probabilities of a text that it
    samples then. `refuse`: the weights are sent again, until the run ends. `warn`: it samples all
    the same, counted in `engine/unverified`."""

    @property
    def transport(self) -> Literal["distributed", "tensor", "disk"]:
        """`sync`, or what follows from `placement`."""
        return self.sync or ("tensor" if self.placement == "colocated" else "distributed")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.placement == "external") != bool(self.urls):
            raise ValueError(
                f"sglang.placement={self.placement} with sglang.urls={list(self.urls)}: external "
                "servers, and only these, need [http://HOST:PORT, ...]; set both or neither"
            )
        if self.speculative is not None and self.sync == "disk":
            raise ValueError(
                "sglang.sync=disk with sglang.speculative: SGLang reads such files into the draft, "
                "too, which stays as it is; set sglang.sync=null"
            )
        if self.placement == "external" and self.sync == "tensor":
            raise ValueError(
                "sglang.sync=tensor with sglang.placement=external: it shares memory, which needs "
                "servers that this run starts itself; set sglang.sync=null"
            )
        if self.placement == "colocated" and self.sync == "distributed":
            raise ValueError(
                "sglang.sync=distributed with sglang.placement=colocated: an NCCL process group "
                "cannot hold one GPU twice, as trainer and as server; set sglang.sync=null"
            )
        return self


class RolloutConfig(Section):
    """Which engine samples how many rollouts."""

    engine: Literal["embedded", "replay", "sglang"] = "embedded"
    """`embedded`: the trainer's own weights and ranks. `sglang`: SGLang servers. `replay`: the
    stored rollouts of another run."""
    prompts_per_step: PositiveInt = 64
    """Prompts of one training step, over all ranks."""
    samples_per_prompt: int = Field(default=4, gt=0, le=65536)
    """Rollouts of each prompt."""
    replay_from: str | None = None
    """`replay`: the run directory whose rollouts are read, step by step."""
    save: Literal["all", "samples", "none"] = "all"
    """Which rollouts are written to `rollouts/`; `samples`: the first 16 of each step."""
    sglang: SglangConfig = SglangConfig()
    prefix: PrefixConfig = PrefixConfig()
    max_staleness: int = Field(default=0, ge=0, le=MAX_STALENESS)
    """Most updates between the weights that sampled a response's first token and the update that
    trains on it. 0: on-policy. K: the rollouts of the next K steps are sampled while this step
    trains; the `embedded` engine samples equally far ahead, but not at the same time."""
    partial: bool = False
    """With `max_staleness`: a response that is unfinished when the weights change continues with
    the new ones. Each token keeps the log-probability and the weight version that sampled it.
    `false`: new weights wait until every response has ended."""
    routing_replay: bool = False
    """The forward pass of a student with experts uses the experts that the servers chose for each
    token of a rollout. Needs `sglang`, which starts its servers for it; refused with `partial`,
    where weights of several versions sample one response."""
    importance_correction: Literal["none", "truncated", "masked"] = "none"
    """Multiplies each token's policy-gradient weight by w = trainer's over engine's probability.
    `truncated`: min(w, threshold). `masked`: w, or 0 outside [1/threshold, threshold]."""
    importance_threshold: float = Field(default=2.0, gt=1)
    """The threshold of `importance_correction`."""

    @property
    def has_servers(self) -> bool:
        """Whether SGLang servers sample the rollouts."""
        return self.engine == "sglang"

    @property
    def publish_every(self) -> int:
        """Updates from one publish to the servers to the next. With `partial` every update. Without
        it new weights wait for all responses, so servers take them as rarely as `max_staleness`
        allows.
        """
        return 1 if self.partial else max(1, self.max_staleness - 1)

    @model_validator(mode="after")
    def _replay(self) -> Self:
        if (self.engine == "replay") != (self.replay_from is not None):
            raise ValueError(
                f"rollout.engine={self.engine} with rollout.replay_from={self.replay_from}: replay "
                "needs the directory of a run, and no other engine reads it; set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _routing_replay(self) -> Self:
        if self.routing_replay and not self.has_servers:
            raise ValueError(
                f"rollout.routing_replay=true with rollout.engine={self.engine}: only sglang "
                "servers send the experts that they chose; set it to false"
            )
        if self.routing_replay and self.partial:
            raise ValueError(
                "rollout.routing_replay=true with rollout.partial=true: the trainer replays one "
                "choice of experts per token, and weights of several versions chose differently; "
                "set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _speculative(self) -> Self:
        if self.routing_replay and self.sglang.speculative is not None:
            raise ValueError(
                "rollout.routing_replay=true with rollout.sglang.speculative: which experts SGLang "
                "reports for proposed tokens has not been tried; set one of them to false or null"
            )
        return self

    @model_validator(mode="after")
    def _ahead(self) -> Self:
        stale = f"rollout.max_staleness={self.max_staleness}"
        if self.partial and not self.max_staleness:
            raise ValueError(
                "rollout.partial=true with rollout.max_staleness=0: on-policy responses end before "
                "the weights change; set max_staleness to at least 1"
            )
        if self.max_staleness and self.engine == "replay":
            raise ValueError(
                f"{stale} with rollout.engine=replay: stored rollouts are not sampled ahead; set "
                "max_staleness to 0"
            )
        if self.max_staleness and self.has_servers and self.sglang.placement == "colocated":
            raise ValueError(
                f"{stale} with rollout.sglang.placement=colocated: servers that sample ahead need "
                "devices of their own; set placement to disaggregated, or max_staleness to 0"
            )
        return self
