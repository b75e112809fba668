"""`stable-opd plan`: what a config will need, as a table or JSON.

    plan = make_plan(config, nodes=1, gpus_per_node=8, server_nodes=0, gpu="h200")
    print(plan.table())

Needs each model's config.json, no weights and no GPU.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.families import Architecture, read_architecture
from stable_opd_mcore.planning.attention import Attention, deterministic_attention
from stable_opd_mcore.planning.choice import Choice, choose
from stable_opd_mcore.planning.hardware import GIB, Device, device_named
from stable_opd_mcore.planning.known_models import model_source
from stable_opd_mcore.planning.layout import Layout, layout_of, refusal, valid_layouts
from stable_opd_mcore.planning.memory import (
    PHASES,
    MemoryPlan,
    Models,
    largest_micro_batch,
    memory_plan,
    with_layout,
)
from stable_opd_mcore.planning.model_size import ModelSize
from stable_opd_mcore.planning.seconds import Servers, StepSeconds, step_seconds
from stable_opd_mcore.planning.topology import Topology, derive_topology
from stable_opd_mcore.planning.work import Work, largest_share


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a job: trainer nodes first, then nodes of SGLang servers."""

    nodes: int
    gpus_per_node: int
    server_nodes: int = 0
    spare_gpus: int = 0  # of the trainer's machine, for disaggregated servers

    @property
    def trainer_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def gpus(self) -> int:
        """Of trainer and servers together."""
        return self.trainer_gpus + self.server_nodes * self.gpus_per_node


@dataclass(frozen=True)
class Plan:
    config: Config
    models: Models
    cluster: Cluster
    servers: Servers
    device: Device
    layout: Layout
    work: Work
    memory: MemoryPlan
    seconds: StepSeconds
    largest_micro_batch: int | None
    topology: Topology

    @property
    def attention(self) -> Attention | None:
        """The student's under train.deterministic; None without, where it is always fused."""
        if not self.config.train.deterministic:
            return None
        size = ModelSize(self.models.student, self.layout)
        return deterministic_attention(self.config, size, self.work)

    @property
    def any_micro_batch_fits(self) -> bool:
        """Whether a rank's share of a minibatch fits as one micro-batch."""
        share = largest_share(self.config, self.layout, self.work)
        return self.largest_micro_batch == share

    @property
    def tokens_per_gpu_second(self) -> float:
        return self.work.trained_tokens(self.config) / self.seconds.total / self.cluster.gpus

    @property
    def gpu_hours(self) -> float:
        return self.config.train.steps * self.seconds.total * self.cluster.gpus / 3600

    @cached_property
    def choice(self) -> Choice:
        """The fastest train.recompute and memory.offload that fit."""
        return choose(
            self.config,
            self.models,
            self.layout,
            self.device,
            self.work,
            self.servers,
            self.cluster.gpus_per_node,
        )

    @property
    def remedy(self) -> str:
        """What makes a run fit that does not."""
        changes = [self.choice.remedy] if self.choice.best.memory.fits else []
        if self.largest_micro_batch:
            changes.insert(0, f"train.micro_batch_tokens={self.largest_micro_batch}")
        return " or ".join(changes) or (
            "a larger parallel.tensor, parallel.pipeline or parallel.context, or more GPUs"
        )

    def as_json(self) -> str:
        values: dict[str, Any] = {
            "gpu": self.device.name,
            "cluster": asdict(self.cluster),
            "layout": asdict(self.layout) | {"data": self.layout.data},
            "servers": {
                "placement": self.topology.placement,
                "count": len(self.topology.servers),
                "tensor": self.topology.tensor,
            },
            "assumed": asdict(self.work),
            "memory_gib": {
                "components": {c.name: round(c.bytes / GIB, 3) for c in self.memory.components},
                "phases": {p: round(self.memory.bytes_in(p) / GIB, 3) for p in PHASES},
                "usable": round(self.memory.usable_bytes / GIB, 3),
                "stage": self.memory.stage,
            },
            "fits": self.memory.fits,
            "largest_micro_batch_tokens": self.largest_micro_batch,
            "any_micro_batch_fits": self.any_micro_batch_fits,
            "choice": self.choice.as_values(),
            "seconds": asdict(self.seconds) | {"total": self.seconds.total},
            "tokens_per_gpu_second": self.tokens_per_gpu_second,
            "gpu_hours": self.gpu_hours,
        }
        return json.dumps(values, indent=1)

    def table(self) -> str:
        """Memory by component and phase, then seconds by phase."""
        memory = Table(title=f"GiB per GPU of pipeline stage {self.memory.stage}: {self.layout}")
        for name in ("", *PHASES):
            memory.add_column(name, justify="left" if not name else "right")
        for item in self.memory.components:
            held = [_gib(item.bytes) if phase in item.phases else "" for phase in PHASES]
            memory.add_row(item.name, *held)
        memory.add_section()
        memory.add_row("sum", *(_gib(self.memory.bytes_in(phase)) for phase in PHASES))
        usable = f"{_gib(self.memory.usable_bytes)} GiB of a {self.device.name} are usable"
        verdict = "fits" if self.memory.fits else "DOES NOT FIT"
        budget = self.largest_micro_batch
        if self.any_micro_batch_fits:
            advice = f"any train.micro_batch_tokens fits: a rank has {budget} tokens in a minibatch"
        else:
            advice = f"the largest train.micro_batch_tokens that fits is {budget}"
        if not budget:
            mends = self.choice.best.memory.fits
            advice = "no train.micro_batch_tokens fits" if mends else f"take {self.remedy}"
        seconds = "  ".join(f"{k} {v:.1f}" for k, v in asdict(self.seconds).items())
        lines = [
            *self.topology.lines(),
            _render(memory),
            f"{verdict}: {usable}; {advice}",
            self.choice.line(),
            *([self.attention.line()] if self.attention else []),
            f"seconds a step: {seconds}  total {self.seconds.total:.1f}",
            f"{self.tokens_per_gpu_second:.0f} tokens/GPU/s, {self.gpu_hours:.0f} GPU-hours for "
            f"{self.config.train.steps} steps",
            f"assumed: {self.work.prompt_tokens} prompt and {self.work.response_tokens} response "
            "tokens on average; rates are estimates that no GPU has confirmed",
        ]
        return "\n".join(lines)


def make_plan(
    config: Config, cluster: Cluster, gpu: str = "h200", work: Work | None = None
) -> Plan:
    """
    Raises:
        UserError: a layout that does not divide GPUs or model, an unknown GPU, or a model whose
            config.json cannot be read.
    """
    device, models = device_named(gpu), read_models(config)
    config = _with_server_nodes(config, cluster)
    layout = layout_of(config.parallel, cluster.trainer_gpus)
    for name, model in (("student", models.student), ("teacher", models.teacher)):
        reason = model and refusal(model, layout)
        if reason:
            raise UserError(f"the {name} does not fit the layout: {reason}")
    return _plan(config, models, layout, cluster, device, work or default_work(config))


def rank_layouts(
    config: Config, cluster: Cluster, gpu: str = "h200", work: Work | None = None
) -> list[Plan]:
    """Plans of every valid layout: those that fit first, fastest first."""
    device, models, work = device_named(gpu), read_models(config), work or default_work(config)
    config = _with_server_nodes(config, cluster)
    architectures = [model for model in (models.student, models.teacher) if model is not None]
    plans = []
    for layout in valid_layouts(architectures, cluster.trainer_gpus, cluster.gpus_per_node):
        # colocated servers do not fit every layout
        with contextlib.suppress(UserError):
            changed = with_layout(config, layout)
            plans.append(_plan(changed, models, layout, cluster, device, work))
    return sorted(plans, key=lambda plan: (not plan.memory.fits, plan.seconds.total))


def layouts_table(plans: list[Plan], rows: int = 20) -> str:
    table = Table(title=f"the first {min(rows, len(plans))} of {len(plans)} layouts")
    for name in ("layout", "GiB", "fits", "s/step", "tokens/GPU/s", "largest micro-batch"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for plan in plans[:rows]:
        table.add_row(
            str(plan.layout),
            _gib(plan.memory.peak_bytes),
            "yes" if plan.memory.fits else "no",
            f"{plan.seconds.total:.1f}",
            f"{plan.tokens_per_gpu_second:.0f}",
            "any" if plan.any_micro_batch_fits else str(plan.largest_micro_batch or "-"),
        )
    return _render(table)


def _with_server_nodes(config: Config, cluster: Cluster) -> Config:
    """Nodes of servers mean rollouts from SGLang, as in slurm/servers.sh."""
    if not cluster.server_nodes:
        return config
    sglang = config.rollout.sglang.model_copy(update={"placement": "external"})
    rollout = config.rollout.model_copy(update={"engine": "sglang", "sglang": sglang})
    return config.model_copy(update={"rollout": rollout})


def default_work(config: Config) -> Work:
    """Responses of half the limit on average."""
    return Work(response_tokens=max(1, config.sampling.max_new_tokens // 2))


def read_models(config: Config) -> Models:
    """Architectures of the models that lie on the trainer's GPUs.

    Raises:
        UserError: a model directory without a readable config.json.
    """
    teacher = config.teacher
    in_trainer = teacher is not None and teacher.engine == "megatron"
    return Models(
        student=_architecture(config.student, "student"),
        teacher=_architecture(teacher, "teacher") if teacher and in_trainer else None,
        reference=config.largest_beta > 0,
    )


def _architecture(model: ModelConfig, name: str) -> Architecture:
    source, _ = model_source(model, name)
    return read_architecture(source, window=model.window, rope_theta=model.rope_theta)


def plan_topology(config: Config, cluster: Cluster, gpu: str) -> Topology:
    """The topology on GPUs of this name; `cpu`: on a CPU, as the tests have it.

    Raises:
        UserError: as `derive_topology` and `read_models`.
    """
    memory_gib = None if gpu == "cpu" else device_named(gpu).memory_gib
    student = _architecture(config.student, "student")
    return _topology(config, student, cluster, memory_gib)


def _topology(
    config: Config, student: Architecture, cluster: Cluster, memory_gib: float | None
) -> Topology:
    return derive_topology(
        config,
        student,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        server_nodes=cluster.server_nodes,
        memory_gib=memory_gib,
        spare_gpus=cluster.spare_gpus,
    )


def _plan(
    config: Config, models: Models, layout: Layout, cluster: Cluster, device: Device, work: Work
) -> Plan:
    """
    Raises:
        UserError: servers without a place; attention without a kernel.
    """
    topology = _topology(config, models.student, cluster, device.memory_gib)
    if topology.placement is None:  # the embedded engine's replicas
        servers = Servers(layout.gradient_ranks, layout.tensor * layout.pipeline, own_gpus=False)
    else:
        own_gpus = topology.placement != "colocated"
        servers = Servers(len(topology.servers), topology.tensor, own_gpus)
    plan = Plan(
        config=config,
        models=models,
        cluster=cluster,
        servers=servers,
        device=device,
        layout=layout,
        work=work,
        memory=memory_plan(config, models, layout, device, work),
        seconds=step_seconds(config, models, layout, device, work, servers, cluster.gpus_per_node),
        largest_micro_batch=largest_micro_batch(config, models, layout, device, work),
        topology=topology,
    )
    if layout.context > 1 and plan.attention is not None and not plan.attention.is_fused:
        raise UserError(
            f"train.deterministic=true with parallel.context={layout.context}: attention of "
            f"{plan.attention.sum}, and from 2^30 on Transformer Engine has no deterministic "
            "kernel that is cut over context ranks: set parallel.context=1, "
            "train.deterministic=false, or a smaller train.micro_batch_tokens"
        )
    return plan


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _render(table: Table) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
