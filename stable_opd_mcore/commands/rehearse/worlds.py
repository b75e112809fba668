"""`stable-opd rehearse`: configs in worlds of several sizes, a line for every pipeline stage.

A world that the layout does not divide is skipped with a line that says so. A world whose layout or
servers do not fit is refused with the numbers and the remedy. Not here: one rank (rank.py),
Transformer Engine's own layers (te_layers.py), and whether memory fits (commands/plan).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stable_opd_mcore.commands.plan.known_models import model_source
from stable_opd_mcore.commands.plan.plan import checked_run
from stable_opd_mcore.commands.plan.planned_run import PlannedRun, Work, planned_run, read_models
from stable_opd_mcore.commands.rehearse import te_layers
from stable_opd_mcore.commands.rehearse.rank import RankReport, rehearse_rank
from stable_opd_mcore.config.models import NamedTeacher, StudentConfig
from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.loading import refuse_unused_expert_ranks
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.description.config_fields import read_fields, with_layers
from stable_opd_mcore.placement.hardware import Cluster
from stable_opd_mcore.placement.layout import layout_of

PROMPT_TOKENS = 256  # every prompt's; fewer where the window leaves less
# Layers of a model chunk with experts: the CPU computes expert after expert, and all are alike.
LAYERS_WITH_EXPERTS = 2


@dataclass(frozen=True)
class StageReport:
    """One rank of one stage."""

    rank: RankReport
    layers: int | None  # the stage's, where fewer than the config's are rehearsed
    run: PlannedRun  # the whole step on the GPU

    @property
    def line(self) -> str:
        ranks = self.run.layout.data
        cut = "" if self.layers is None else f" (layers: {self.layers})"
        idle = ranks - self.run.sequences
        idle_ranks = f" ({idle} of {ranks} data-parallel ranks have no sequence)"
        return (
            f"stage {self.rank.stage}  {self.rank.seconds:5.1f} s  torch's layers{cut}; "
            f"{self.waits}  ok"
            f"{idle_ranks if idle > 0 else ''}"
        )

    @property
    def waits(self) -> str:
        """How often the host waits for the GPU in the rehearsed step, and where."""
        counts = self.rank.host_waits
        places = ", ".join(
            place + (f" x {count}" if count > 1 else "") for place, count in counts.items()
        )
        return f"the host waits {sum(counts.values())} times: {places}"


def rehearse_worlds(
    configs: Sequence[Config],
    clusters: Sequence[Cluster],
    gpu: str,
    say: Callable[[str], None],
    layers: int | None = None,
) -> bool:
    """Rehearse every config in every world; whether none was refused and each had a world."""
    say(_layers())
    passed = True
    for config in configs:
        for name, model in config.models_in_trainer.items():
            if note := model_source(model, name)[1]:
                say(f"{config.run.name}: {note}")
        divided = False
        for cluster in clusters:
            name = f"{config.run.name}  {cluster.nodes} x {cluster.gpus_per_node} {gpu}"
            try:
                layout = layout_of(config.parallel, cluster.trainer_gpus)
            except UserError as error:
                say(f"{name}  skipped: {error}")
                continue
            divided = True
            try:
                for stage in range(layout.pipeline):
                    report = rehearse_stage(config, cluster, gpu, stage, layers)
                    say(f"{name}  {layout}  {report.line}")
                if te_layers.is_installed():
                    say(f"{name}  {layout}  {_compare_layers(config, cluster, layers)}")
            except UserError as error:
                passed = False
                say(f"{name}  {layout}  REFUSED: {error}")
        if not divided:
            passed = False
            say(f"{config.run.name}: REFUSED: no world is divided by its layout")
    return passed


def rehearse_stage(
    config: Config, cluster: Cluster, gpu: str, stage: int, layers: int | None = None
) -> StageReport:
    """The first rank of one pipeline stage, with `layers` layers a model chunk.

    None: LAYERS_WITH_EXPERTS of a model with experts, and all of others.
    """
    whole = checked_run(config, cluster, gpu, longest_work(config, read_models(config).student))
    run, of_stage = with_few_layers(replace(whole, config=config), layers)
    run = with_few_prompts(run)
    refuse_unused_expert_ranks(run.config, run.models.student)
    report = rehearse_rank(
        run.config,
        cluster.trainer_gpus,
        rank=stage * (cluster.trainer_gpus // run.layout.pipeline),
        prompt_tokens=run.work.prompt_tokens,
        vocab_size=_vocabulary(run),
    )
    return StageReport(report, of_stage, whole)


def _compare_layers(config: Config, cluster: Cluster, layers: int | None) -> str:
    """See te_layers.compare_layers; on the ranks and with the layers that are rehearsed."""
    run, _ = with_few_layers(planned_run(config, cluster), layers)
    gpus, stages = cluster.trainer_gpus, run.layout.pipeline
    return te_layers.compare_layers(run.config, gpus, range(0, gpus, gpus // stages))


def longest_work(config: Config, student: Architecture) -> Work:
    """Every response at the limit."""
    window, response = student.max_positions, config.longest_turn
    section = "sampling" if response == config.sampling.max_new_tokens else "environment"
    key = f"{section}.max_new_tokens"
    if response >= window:
        raise UserError(
            f"{key}={response} leaves no room for a prompt in the student's "
            f"window of {window} positions: lower it below {window}, or raise student.window"
        )
    prompt = min(PROMPT_TOKENS, window - response)
    budget = config.train.micro_batch_tokens
    if budget < prompt + response:
        room = (
            budget - PROMPT_TOKENS
        )  # 0 or less: a longer prompt would take a shorter response's room
        lower = f", or lower {key} to {room}" if room > 0 else ""
        raise UserError(
            f"train.micro_batch_tokens={budget} is less than the longest sequence, {prompt} prompt "
            f"tokens + {key}={response}, which would exceed the budget: set "
            f"train.micro_batch_tokens={prompt + response} or more{lower}"
        )
    return Work(prompt_tokens=prompt, response_tokens=response)


def with_few_prompts(run: PlannedRun) -> PlannedRun:
    """One prompt a minibatch, with as many responses as fill the pipeline's micro-batches.

    Later micro-batches take the same memory. Supervised fine-tuning has one sequence a prompt, so
    it gets more prompts. The budget becomes what whole sequences fill of it. Nothing is offloaded:
    fake storages cannot move to the host.
    """
    config, layout = run.config, run.layout
    in_micro_batch = config.train.micro_batch_tokens // run.work.tokens
    minibatches = config.train.minibatches
    of_rank = (run.rollouts or run.golden) // layout.data // minibatches
    if of_rank > in_micro_batch:
        micro_batches = min(of_rank // in_micro_batch, layout.pipeline * layout.virtual)
        of_rank = micro_batches * in_micro_batch
    sequences = max(1, of_rank) * layout.data  # those of a minibatch
    if config.is_supervised:
        changes = {"prompts_per_step": minibatches * sequences}
    else:
        changes = {"prompts_per_step": minibatches, "samples_per_prompt": sequences}
    budget = {"micro_batch_tokens": in_micro_batch * run.work.tokens}
    return run.changed(rollout=changes, train=budget, memory={"offload": ()})


def with_few_layers(run: PlannedRun, layers: int | None) -> tuple[PlannedRun, int | None]:
    """Sizes in place of model directories; and a stage's layers, or None if no model was cut."""
    layout, cut = run.layout, None
    changes: dict[str, ModelConfig] = {}
    for name, model in run.config.models_in_trainer.items():
        fields = dict(read_fields(model_source(model, name)[0])[1])
        size = run.student if name == "student" else run.frozen[name]
        of_chunk = layers or (LAYERS_WITH_EXPERTS if size.architecture.experts else None)
        chunks = layout.pipeline * layout.virtual
        if of_chunk and size.architecture.num_layers > of_chunk * chunks:
            fields = with_layers(fields, of_chunk * chunks)
            cut = of_chunk * layout.virtual
        update: dict[str, Any] = {"path": None, "architecture": fields}
        if isinstance(model, StudentConfig) and model.lora:  # its adapter has all layers
            update["lora"] = model.lora.model_copy(update={"path": None})
        changes[name] = model.model_copy(update=update)
    if (teacher := changes.get("teacher")) and run.config.teacher and run.config.teacher.models:
        named = {n.removeprefix("teacher.models."): changes.pop(n) for n in run.models.in_turn}
        base = NamedTeacher(architecture=teacher.architecture)  # no adapter fits fewer layers
        named |= dict.fromkeys(run.config.teacher.adapters, base)
        changes["teacher"] = teacher.model_copy(update={"models": named})
    config = run.config.model_copy(update=changes)
    return replace(run, config=config, models=read_models(config)), cut


def _vocabulary(run: PlannedRun) -> int:
    """Entries of the smallest model."""
    sizes = (run.student, *run.frozen.values())
    return min(size.architecture.vocab_size for size in sizes)


def _layers() -> str:
    built = "built and compared with torch's" if te_layers.is_installed() else "not installed"
    return (
        f"Transformer Engine's layers are {built}. They compute on GPUs only: the rehearsed step "
        "has torch's layers"
    )
