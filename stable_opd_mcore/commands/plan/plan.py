"""`stable-opd plan`: what a config will need, as a table or JSON.

    plan = make_plan(config, Cluster(nodes=1, gpus_per_node=8), gpu="h200")
    print(plan.table())

Needs each model's config.json, no weights and no GPU.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from stable_opd_mcore.commands.plan import topology_text
from stable_opd_mcore.commands.plan.memory import (
    PHASES,
    MemoryPlan,
    largest_micro_batch,
    memory_plan,
)
from stable_opd_mcore.commands.plan.planned_run import PlannedRun, Work, planned_run
from stable_opd_mcore.commands.plan.seconds import StepSeconds, step_seconds, turn_seconds
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.training import Offloadable, Recompute
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.placement.draft import least_tokens
from stable_opd_mcore.placement.hardware import GIB, Cluster
from stable_opd_mcore.placement.layout import refuse_layout, valid_layouts


@dataclass(frozen=True)
class Plan:
    """What a run needs and takes, and what would make it fit or faster."""

    run: PlannedRun

    @cached_property
    def memory(self) -> MemoryPlan:
        return memory_plan(self.run)

    @cached_property
    def seconds(self) -> StepSeconds:
        return step_seconds(self.run)

    @property
    def recompute(self) -> Recompute:
        return self.run.config.train.recompute

    @property
    def offload(self) -> tuple[Offloadable, ...]:
        """The offloaded parts that the run has, in the schema's order."""
        parts = offloadable(self.run)
        return tuple(part for part in parts if part in self.run.config.offloaded)

    @cached_property
    def largest_micro_batch(self) -> int | None:
        return largest_micro_batch(self.run)

    @cached_property
    def choice(self) -> Choice:
        """The fastest train.recompute and memory.offload that fit."""
        return choose(self)

    @property
    def any_micro_batch_fits(self) -> bool:
        """Whether a rank's share of a minibatch fits as one micro-batch."""
        return self.largest_micro_batch == self.run.largest_share

    @property
    def gpu_hours(self) -> float:
        return self.run.config.train.steps * self.seconds.total * self.run.cluster.gpus / 3600

    @property
    def remedy(self) -> str:
        """Settings to change where the run does not fit."""
        changes = [self.choice.remedy] if self.choice.best.memory.fits else []
        if self.largest_micro_batch:
            changes.insert(0, f"train.micro_batch_tokens={self.largest_micro_batch}")
        return " or ".join(changes) or (
            "a larger parallel.tensor, parallel.pipeline or parallel.context, or more GPUs"
        )

    def as_json(self) -> str:
        run, best = self.run, self.choice.best
        values: dict[str, Any] = {
            "gpu": run.device.name,
            "cluster": asdict(run.cluster),
            "layout": asdict(run.layout) | {"data": run.layout.data},
            "servers": {
                "placement": run.topology.placement,
                "count": len(run.topology.servers),
                "tensor": run.topology.tensor,
                "publish_gib": round(run.published_bytes / GIB, 3),
                "frozen_gib": round(run.frozen_bytes / GIB, 3),
                "draft_gib": round(run.draft_bytes / GIB, 3),
            },
            "assumed": asdict(run.work) | {"teacher_prompt_tokens": run.teacher_prompt_tokens},
            "memory_gib": {
                "components": {c.name: round(c.bytes / GIB, 3) for c in self.memory.components},
                "phases": {p: round(self.memory.bytes_in(p) / GIB, 3) for p in PHASES},
                "usable": round(self.memory.usable_bytes / GIB, 3),
                "stage": self.memory.stage,
            },
            "fits": self.memory.fits,
            "largest_micro_batch_tokens": self.largest_micro_batch,
            "any_micro_batch_fits": self.any_micro_batch_fits,
            "choice": {
                "fits": best.memory.fits,
                "overrides": shlex.split(self.choice.remedy),
                "recompute": best.recompute,
                "offload": best.offload,
                "peak_gib": round(best.memory.peak_bytes / GIB, 3),
                "seconds": best.seconds.total,
            },
            "seconds": asdict(self.seconds) | {"total": self.seconds.total},
            "gpu_hours": self.gpu_hours,
        }
        return json.dumps(values, indent=1)

    def table(self) -> str:
        """Memory by component and phase, then seconds by phase."""
        run, stage = self.run, self.memory.stage
        memory = Table(title=f"GiB per GPU of pipeline stage {stage}: {run.layout}")
        for name in ("", *PHASES):
            memory.add_column(name, justify="left" if not name else "right")
        for item in self.memory.components:
            held = [_gib(item.bytes) if phase in item.phases else "" for phase in PHASES]
            memory.add_row(item.name, *held)
        memory.add_section()
        memory.add_row("sum", *(_gib(self.memory.bytes_in(phase)) for phase in PHASES))
        usable = f"{_gib(self.memory.usable_bytes)} GiB of a {run.device.name} are usable"
        verdict = "fits" if self.memory.fits else "DOES NOT FIT"
        budget = self.largest_micro_batch
        if self.any_micro_batch_fits:
            advice = f"any train.micro_batch_tokens fits: a rank has {budget} tokens in a minibatch"
        else:
            advice = f"the largest train.micro_batch_tokens that fits is {budget}"
        if not budget:
            can_fit = self.choice.best.memory.fits
            advice = "no train.micro_batch_tokens fits" if can_fit else f"take {self.remedy}"
        seconds = "  ".join(f"{k} {v:.0f}" for k, v in asdict(self.seconds).items())
        lines = [
            *topology_text.lines(run.topology),
            _render(memory),
            f"{verdict}: {usable}; {advice}",
            self.choice.line(),
            f"rough seconds a step: {seconds}  total {self.seconds.total:.0f}; "
            f"{self.gpu_hours:.0f} GPU-hours for {run.config.train.steps} steps",
            f"assumed: {run.work.prompt_tokens} prompt and {run.work.response_tokens} response "
            "tokens on average; no GPU has confirmed the seconds",
        ]
        if run.published_bytes:
            frozen = f", after {_gib(run.frozen_bytes)} GiB once" if run.frozen_bytes else ""
            lines.append(f"a publish sends {run.published_bytes / GIB:.2f} GiB{frozen}")
        if run.draft_bytes:
            least = least_tokens(run.config, run.models.student, run.element)
            lines.append(
                f"draft: {_gib(run.draft_bytes)} GiB of a server's weights; it costs more than it "
                f"saves below {least:.2f} of engine/accepted_tokens_per_step, and earlier where "
                "servers are busy"
            )
        if run.models.in_turn:
            held = max(sum(run.turn_bytes(s)) for s in {0, run.layout.pipeline - 1})
            lines.append(
                f"{1 + len(run.models.in_turn)} teachers take turns: {_gib(held)} GiB of host "
                f"memory for each GPU, their copies {turn_seconds(run):.1f} s of a step"
            )
        if run.work.observed_tokens:
            lines.append(
                f"assumed: {run.work.observed_tokens} observed tokens of an episode on average"
            )
        if run.teacher_prompt_tokens is not None:
            lines.append(
                f"assumed: {run.teacher_prompt_tokens} tokens of teacher.prompt on average"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Choice:
    """The chosen train.recompute and memory.offload, and the config's own."""

    own: Plan
    best: Plan  # the fastest that fits; the one that needs least if none fits

    @property
    def remedy(self) -> str:
        """Settings to add to the command line, quoted for a shell; "" for none."""
        changes = []
        if self.best.recompute != self.own.recompute:
            changes.append(f"train.recompute={self.best.recompute}")
        if self.best.offload != self.own.offload:
            changes.append(f"memory.offload=[{','.join(self.best.offload)}]")
        return shlex.join(changes)

    def line(self) -> str:
        """The choice in one line."""
        best, own = self.best, self.own
        needed = f"{best.memory.peak_bytes / GIB:.1f} GiB"
        if not best.memory.fits:
            what = self.remedy or "this config"
            return f"no train.recompute and memory.offload fit: {what} needs least, {needed}"
        what = self.remedy or "this config's train.recompute and memory.offload"
        took = f" instead of {own.seconds.total:.0f}" if own.memory.fits and self.remedy else ""
        return f"fastest that fits: {what} (about {best.seconds.total:.0f}{took} s, {needed})"


def choose(own: Plan) -> Choice:
    """The fastest combination that fits, of at most 48. Host memory is not counted.

    Among equally fast ones it is the config's own, then the one that keeps the trainer least busy:
    rollouts of the next step may hide the difference (rollout.max_staleness).
    """
    run, parts = own.run, offloadable(own.run)
    subsets = [subset for n in range(len(parts) + 1) for subset in combinations(parts, n)]
    others = (
        run.changed(train={"recompute": recompute}, memory={"offload": offload})
        for recompute, offload in product(get_args(Recompute), subsets)
    )
    every = [own, *map(Plan, others)]
    fitting = [each for each in every if each.memory.fits]
    if not fitting:
        return Choice(own, min(every, key=lambda it: (it.memory.peak_bytes, it.seconds.total)))

    def order(each: Plan) -> tuple[float, bool, float]:
        return round(each.seconds.total, 6), each is not own, -each.seconds.rollout

    return Choice(own, min(fitting, key=order))


def offloadable(run: PlannedRun) -> tuple[Offloadable, ...]:
    """The parts that `memory.offload` may name in this run."""
    absent: set[Offloadable] = set()
    if not run.config.is_colocated:
        absent.add("student")
    if not any(map(run.stays, run.frozen)):
        absent.add("frozen")
    return tuple(part for part in get_args(Offloadable) if part not in absent)


def make_plan(
    config: Config, cluster: Cluster, gpu: str = "h200", work: Work | None = None
) -> Plan:
    """A UserError refuses layouts, GPUs, models and servers that cannot be planned."""
    return Plan(checked_run(config, cluster, gpu, work))


def checked_run(
    config: Config, cluster: Cluster, gpu: str = "h200", work: Work | None = None
) -> PlannedRun:
    """The run that is planned. A UserError refuses layouts, models and servers that do not fit the
    GPUs; memory is not asked."""
    run = planned_run(config, cluster, gpu, work)
    _ = run.layout  # refuses GPUs that it does not divide
    models = {"student": run.models.student, "teacher": run.models.teacher}
    for role, model in (models | dict(run.models.in_turn)).items():
        if model is not None:
            refuse_layout(role, model, config.parallel)
    _ = run.topology  # refuses servers without a place
    return run


def rank_layouts(
    config: Config, cluster: Cluster, gpu: str = "h200", work: Work | None = None
) -> list[Plan]:
    """Plans of every valid layout: those that fit first, then those that cut a model least."""
    run = planned_run(config, cluster, gpu, work)
    every = (run.models.student, run.models.teacher, *run.models.in_turn.values())
    models = [model for model in every if model is not None]
    plans = []
    for parallel in valid_layouts(models, cluster.trainer_gpus, cluster.gpus_per_node):
        changed = replace(run, config=run.config.model_copy(update={"parallel": parallel}))
        with contextlib.suppress(UserError):  # colocated servers do not fit every layout
            _ = changed.topology
            plans.append(Plan(changed))

    def order(plan: Plan) -> tuple[bool, int, int, float]:
        layout = plan.run.layout
        return not plan.memory.fits, -layout.data, layout.pipeline, plan.memory.peak_bytes

    return sorted(plans, key=order)


def layouts_json(plans: list[Plan]) -> str:
    """All plans in their order, one object."""
    rows = [
        {
            "layout": asdict(plan.run.layout) | {"data": plan.run.layout.data},
            "peak_gib": round(plan.memory.peak_bytes / GIB, 3),
            "fits": plan.memory.fits,
            "largest_micro_batch_tokens": plan.largest_micro_batch,
            "any_micro_batch_fits": plan.any_micro_batch_fits,
        }
        for plan in plans
    ]
    return json.dumps({"layouts": rows}, indent=2)


def layouts_table(plans: list[Plan], rows: int = 20) -> str:
    table = Table(title=f"the first {min(rows, len(plans))} of {len(plans)} layouts")
    for name in ("layout", "GiB", "fits", "largest micro-batch"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for plan in plans[:rows]:
        table.add_row(
            str(plan.run.layout),
            _gib(plan.memory.peak_bytes),
            "yes" if plan.memory.fits else "no",
            "any" if plan.any_micro_batch_fits else str(plan.largest_micro_batch or "-"),
        )
    return _render(table)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _render(table: Table) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
